"""The gRPC servicers of the reorder service, one for each .proto file: they decode requests, call what answers, encode answers."""
