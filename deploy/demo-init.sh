#!/bin/sh
# Makes, once, what an operator and four sites would bring: certificates, and for each site a key, a
# policy and data.
# /hub is the server's folder; /sites/NAME is the folder that only site NAME sees.
set -eu

[ -e /hub/ca.crt ] || fedda keys init --dir /hub --host server
# A site sends a gradient only if it covers 256 examples or more, so each site gets more.
fedda data digits /tmp/digits --train 600
for name in handwritten blended street; do
  [ -e "/hub/nodes/$name.pub" ] || fedda keys add "$name" --role source --dir /hub
done
[ -e /hub/nodes/fonts.pub ] || fedda keys add fonts --role target --dir /hub
for name in handwritten blended street fonts; do
  mkdir -p "/sites/$name/data"
  cp /hub/ca.crt "/sites/$name/ca.crt"
  # All sites' public keys. In earnest a site gets them by a way that the server does not control.
  cp /hub/peers "/sites/$name/peers"
  # An account of its data leaves a site only if its policy says so.
  [ -e "/sites/$name/policy.toml" ] || printf '[leaving]\nlook = true\n' > "/sites/$name/policy.toml"
  # Moved, not copied: a private key belongs to its site alone, so the server keeps none.
  [ -e "/sites/$name/key" ] || mv "/hub/nodes/$name" "/sites/$name/key"
  cp "/tmp/digits/$name/data.npz" "/sites/$name/data/data.npz"
done
# Only this service runs as root: new volumes belong to root, and the others run as this user.
chown -R 10001:10001 /hub /sites
