"""`make bench`: ragfence beside raw redis-py and AWS Lambda Powertools, interleaved in one run."""
