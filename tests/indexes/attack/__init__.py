"""The attack on index builds: raced, killed, frozen, purged and searched by real processes, judged from outside."""
