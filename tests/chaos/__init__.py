"""An attack by real processes: killed, frozen and cut off at every named point, then judged from outside."""
