# A stand-in for the official Redis image, for machines that reach no image registry.
ARG BASE=headrace-base:latest
FROM ${BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner=redis --group=redis /data
USER redis
WORKDIR /data
VOLUME /data
EXPOSE 6379
CMD ["redis-server"]
