#!/bin/sh
# Makes, once, a key for each site of the demo in the server's pod, and hands every site its own as the
# Secret `keys` of its namespace. Needs kubectl, and the server to be ready.
set -eu

server() { kubectl exec --namespace fedda-demo server-0 --container server -- "$@"; }

keys=$(mktemp -d)
trap 'rm -rf "$keys"' EXIT
for name in handwritten blended street; do
  server test -e "/hub/nodes/$name.pub" || server fedda keys add "$name" --role source --dir /hub
done
server test -e /hub/nodes/fonts.pub || server fedda keys add fonts --role target --dir /hub
# Only now, as `peers` has to hold the keys of all.
for name in handwritten blended street fonts; do
  kubectl get secret keys --namespace "fedda-demo-$name" >/dev/null 2>&1 && continue
  server cat /hub/ca.crt > "$keys/ca.crt"
  server cat /hub/peers > "$keys/peers"
  server cat "/hub/nodes/$name" > "$keys/key"
  kubectl create secret generic keys --namespace "fedda-demo-$name" \
    --from-file="$keys/ca.crt" --from-file="$keys/peers" --from-file="$keys/key"
  server rm "/hub/nodes/$name" # a private key belongs to its site alone
done
