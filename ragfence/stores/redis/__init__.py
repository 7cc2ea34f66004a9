"""The fence store on Redis and Valkey."""
