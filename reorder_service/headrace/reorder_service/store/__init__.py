"""What must survive the process: the state store, the Redis server behind it, and the records that it keeps."""
