"""The gRPC servicers of the reorder service, one for each .proto: they decode requests, call what answers, encode answers."""
