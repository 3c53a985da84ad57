"""The gRPC servicers of the reorder service, one per .proto file: they decode requests, call the service and encode replies."""
