"""The web page: a read-only HTTP server in the service's event loop, and what it tells of jobs, steps and preprocessors."""
