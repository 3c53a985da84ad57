"""`headrace bench`: measures how fast this machine preprocesses a data set and transports payload."""
