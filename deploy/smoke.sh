#!/usr/bin/env bash
# Builds the image, runs compose.demo.yml for a few rounds and a site of compose.client.yml with it, tries
# from inside the containers what they must not reach, turns a site away, and removes everything again.
# About ten minutes.
#
#   deploy/smoke.sh
#   deploy/smoke.sh --no-build   # with the image that is there
#
# Needs Docker with compose, and the right to use it. Containers and volumes are those of the projects
# fedda-smoke and fedda-smoke-clinic, so a demo that is running is not touched. Exit code 0: all holds.
set -euo pipefail
cd "$(dirname "$0")/.."

SITES=(handwritten blended street fonts)
listener=""
folder=$(mktemp -d) # of the site that is not the demo's

compose() { docker compose -p fedda-smoke -f deploy/compose.demo.yml "$@"; }
clinic() {
  HOST=server ROLE=source NAME=clinic DATA=$folder/data CA=$folder/ca.crt KEY=$folder/clinic \
    RUN_AS=12345:12345 docker compose -p fedda-smoke-clinic -f deploy/compose.client.yml "$@"
}
fail() {
  echo "FAILED: $*" >&2
  exit 1
}
clean() {
  local code=$?
  [ $code -eq 0 ] || { compose logs --tail 30; clinic logs --tail 30; } >&2 || true
  compose down --volumes --timeout 5 >/dev/null 2>&1 || true
  clinic down --volumes --timeout 5 >/dev/null 2>&1 || true
  rm -rf "$folder"
  [ -z "$listener" ] || docker rm --force "$listener" >/dev/null 2>&1 || true
  exit $code
}
trap clean EXIT

# Tries to connect to HOST PORT from one service -> "open", "closed" (somebody refused) or "nothing".
DIAL='
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()
    print("open")
except ConnectionRefusedError:
    print("closed")
except OSError:
    print("nothing")
'
dial() { compose exec -T "$1" python -c "$DIAL" "$2" "$3"; }
address() { # of a container, in each of its networks
  docker inspect --format '{{range .NetworkSettings.Networks}}{{println .IPAddress}}{{end}}' "$1"
}

echo "== build, and wait until every site has joined"
compose down --volumes --timeout 5 2>/dev/null || true
clinic down --volumes --timeout 5 2>/dev/null || true
[ "${1:-}" = --no-build ] || compose build --quiet
size=$(docker image inspect --format '{{.Size}}' fedda)
echo "image: $((size / 1000000)) MB"
compose up --detach --wait --wait-timeout 300

echo "== what the sites' data look like, before any training"
compose exec -T server fedda look --server /hub --out /runs/look --expect 4
compose exec -T server test -s /runs/look/look.json

echo "== a run of KD3A with sealed models, a secure sum, and DILS, which sums gradients at the exchange"
compose exec -T server fedda run kd3a --server /hub --dir /runs --rounds 1 -c train.lr=0.01 \
  -c kd3a.relay=sealed -c wait.min-sources=3 -c input.size=16 -c input.channels=1
compose exec -T server fedda run fedavg --server /hub --dir /runs --rounds 1 -c train.lr=0.01 \
  -c secure=sum -c wait.min-sources=3 -c input.size=16 -c input.channels=1
compose exec -T server fedda run dils --server /hub --dir /runs --baseline none --rounds 3 \
  -c collaborator=handwritten -c pretrain=2 -c train.lr=0.01 \
  -c wait.min-sources=3 -c input.size=16 -c input.channels=1
compose exec -T server test -s /runs/kd3a/report.html
compose exec -T fonts test -s /state/site/fonts/dils.dils-0.model.safetensors

echo "== what a site reaches: the server's two ports, and nothing else"
# A listener on all of the host's addresses; that a container of an ordinary network reaches it shows
# that the probes below can fail.
listener=$(docker run --detach --rm --network host fedda python -m http.server 18099)
gateway=$(docker run --rm fedda python -c '
import socket, struct
for line in list(open("/proc/net/route"))[1:]:
    name, target, via, *_ = line.split()
    if target == "00000000":
        print(socket.inet_ntoa(struct.pack("<L", int(via, 16))))
')
for _ in $(seq 20); do
  seen=$(docker run --rm fedda python -c "$DIAL" "$gateway" 18099)
  [ "$seen" = open ] && break
  sleep 0.5
done
[ "$seen" = open ] || fail "the probe itself: an ordinary container does not reach the host ($seen)"
hosts=("$gateway" $(docker run --rm --network host fedda python -c '
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try:
    s.connect(("192.0.2.1", 9))
    print(s.getsockname()[0])
except OSError:
    pass
'))
for site in "${SITES[@]}"; do
  [ "$(dial "$site" server 8443)" = open ] || fail "$site does not reach the server"
  [ "$(dial "$site" server 8000)" = closed ] || fail "$site reaches the operator's port"
  own=$(docker network inspect --format '{{range .IPAM.Config}}{{.Subnet}} {{.Gateway}}{{end}}' \
    "fedda-smoke_$site")
  read -r subnet bridge <<<"$own"
  # Some engines name no gateway; the first address is, or would be, it.
  first="${subnet%.*}.1"
  for host in "${hosts[@]}" ${bridge:+"$bridge"} "$first"; do
    seen=$(dial "$site" "$host" 18099)
    [ "$seen" = nothing ] || fail "$site reaches the host machine at $host ($seen)"
  done
  seen=$(dial "$site" 1.1.1.1 443)
  [ "$seen" = nothing ] || fail "$site reaches the internet ($seen)"
  for other in "${SITES[@]}"; do
    [ "$other" = "$site" ] && continue
    for ip in $(address "$(compose ps --quiet "$other")"); do
      seen=$(dial "$site" "$ip" 18099)
      [ "$seen" = nothing ] || fail "$site reaches $other at $ip ($seen)"
    done
  done
done

echo "== a site of compose.client.yml trains through its gate, and reaches nothing else"
compose exec -T server fedda keys add clinic --role source --dir /hub
compose cp server:/hub/nodes/clinic "$folder/clinic"
compose cp server:/hub/ca.crt "$folder/ca.crt"
compose cp handwritten:/site/data "$folder/data"
chmod -R a+rX "$folder"/*
clinic create --quiet-pull
docker network connect --alias server fedda-smoke-clinic_outside "$(compose ps --quiet server)"
clinic up --detach --wait --wait-timeout 120
compose exec -T server fedda run fedavg --server /hub --dir /runs --name gated --rounds 1 \
  -c train.lr=0.01 -c secure=none -c wait.min-sources=4 -c input.size=16 -c input.channels=1
compose exec -T server fedda run dils --server /hub --dir /runs --name gated-sums --baseline none \
  --rounds 3 -c collaborator=clinic -c pretrain=2 -c train.lr=0.01 -c input.size=16 -c input.channels=1
probe() { clinic exec -T client python -c "$DIAL" "$1" "$2"; }
[ "$(probe server 8443)" = open ] || fail "the clinic does not reach the server"
[ "$(probe server 8000)" = closed ] || fail "the clinic's gate has another port"
for ip in $(address "$(compose ps --quiet server)"); do
  seen=$(probe "$ip" 8443)
  [ "$seen" = nothing ] || fail "the clinic reaches the server beside its gate at $ip ($seen)"
done
bridge=$(docker network inspect --format '{{range .IPAM.Config}}{{.Subnet}}{{end}}' fedda-smoke-clinic_inside)
for host in "${hosts[@]}" "${bridge%.*}.1"; do
  seen=$(probe "$host" 18099)
  [ "$seen" = nothing ] || fail "the clinic reaches the host machine at $host ($seen)"
done
for host in 1.1.1.1 example.org; do # also no name outside is looked up
  seen=$(probe "$host" 443)
  [ "$seen" = nothing ] || fail "the clinic reaches $host ($seen)"
done

echo "== a state folder is its user's alone"
seen=$(clinic exec -T client stat --format '%a %u:%g' /state)
[ "$seen" = "700 12345:12345" ] || fail "the clinic's state folder is $seen"
for user in 10001 65534; do
  docker run --rm --user "$user" --volume fedda-smoke-clinic_state:/state fedda \
    sh -c 'ls /state || touch /state/other' 2>/dev/null && fail "user $user gets into the state folder"
done

echo "== a site that is turned away says so"
compose exec -T server fedda keys revoke street --dir /hub
for _ in $(seq 60); do
  compose logs street 2>/dev/null | grep -q "does not accept this site's key any more" && break
  sleep 1
done
compose logs street | grep "does not accept this site's key any more" ||
  fail "street did not say that its key was revoked"
echo "== all of it holds"
