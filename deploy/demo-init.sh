#!/bin/sh
# Makes, once, what an operator and four sites would bring: certificates, a key per site, and data.
# /hub is the server's folder; /sites/NAME becomes the folder that only site NAME gets to see.
set -eu

[ -e /hub/ca.crt ] || fedda keys init --dir /hub --host server
# A gradient leaves a site only over 256 examples or more, so each brings more than those.
fedda data digits /tmp/digits --train 600
for name in handwritten blended street fonts; do
  [ -e "/hub/nodes/$name.pub" ] || fedda keys add "$name" --dir /hub
  mkdir -p "/sites/$name/data"
  cp /hub/ca.crt "/sites/$name/ca.crt"
  # Handed out, so gone from the server: a private key belongs to its site alone.
  [ -e "/sites/$name/key" ] || mv "/hub/nodes/$name" "/sites/$name/key"
  cp "/tmp/digits/$name/data.npz" "/sites/$name/data/data.npz"
done
# This is root's only job: new volumes belong to root, and the server and the sites do not run as it.
chown -R 10001:10001 /hub /sites
