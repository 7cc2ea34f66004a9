"""The attack on documents: raced, killed, frozen and forgotten, then judged from what lies outside of ragfence."""
