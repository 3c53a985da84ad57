#!/bin/sh
# Make the cluster's papers below /papers, in a folder for each part, of which it sees no other: certificates (`headrace certs`),
# tokens (`headrace tokens`) and the store's password. What is there stays; certificates are renewed once two thirds of their time are over.
set -eu
umask 077
cd /papers

headrace certs /papers --store-host redis
headrace tokens /papers/reorder/tokens
cd reorder/tokens
# The trainer submits the job that it trains.
head -n 1 train | grep -qxF -f - submit || head -n 1 train >>submit
head -n 1 preprocess >/papers/preprocessor/token
mkdir -p /papers/preprocessor/tokens
cp train /papers/preprocessor/tokens/train
head -n 1 train >/papers/trainer/token
head -n 1 submit >/papers/client/token
cd /papers

[ -s reorder/store-password ] || python -c "import secrets; print(secrets.token_hex(32))" >reorder/store-password
digest=$(tr -d '\n' <reorder/store-password | sha256sum | cut -d ' ' -f 1)
sed -e "/^#/d" -e "s/DIGEST/$digest/" /users.acl >store/users.acl
# Read by another user, that of Redis, in a volume that no other container has. The users are told by the password's digest only.
chmod 644 store/users.acl store/tls.key
chmod 755 store
