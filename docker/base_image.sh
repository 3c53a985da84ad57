#!/bin/sh
# Build a stand-in for python:3.11-slim out of Debian bookworm's own packages, for machines that reach no image registry.
#
#   docker/base_image.sh [TAG]        default: headrace-base:latest
#
# Needs root, debootstrap and a running engine. MIRROR: where Debian's packages come from (default: as on this machine).
set -eu
command -v debootstrap >/dev/null || { echo "debootstrap is not here: apt-get install debootstrap" >&2; exit 1; }

tag=${1:-headrace-base:latest}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root

sources=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list 2>/dev/null || true)
mirror=${MIRROR:-$(printf '%s\n' "$sources" | awk '$1 == "URIs:" || $1 == "deb" { print $2; exit }')}

# shellcheck disable=SC2086  # an empty mirror must vanish: debootstrap then takes its own default
debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv bookworm "$root" $mirror >"$work/log" 2>&1 ||
    { tail -n 20 "$work/log" >&2; exit 1; }

rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED # pip may install into the image's interpreter, as in the official image
ln -s ../../bin/python3 "$root/usr/local/bin/python"
[ -z "$mirror" ] || echo "deb $mirror bookworm main" >"$root/etc/apt/sources.list"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" # authorities this machine trusts beyond Debian's

rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/*.log \
    "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/locale/*
find "$root/usr/lib" -name __pycache__ -prune -exec rm -rf {} +

tar -C "$root" --numeric-owner -c . | docker import \
    --change 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' \
    --change 'ENV LANG=C.UTF-8' \
    --change 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt' \
    --change 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' \
    --change 'CMD ["python3"]' \
    - "$tag"
