# A stand-in for the official Prometheus image, for machines that reach no image registry.
ARG BASE=headrace-base:latest
FROM ${BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/*
USER nobody
EXPOSE 9090
ENTRYPOINT ["prometheus"]
