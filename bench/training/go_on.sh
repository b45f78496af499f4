#!/usr/bin/env bash
# Train the demo checkpoint on, unattended: its drafter, and with TUNE_S before that the trunk on a
# mix with more of what it misses. Leaves the changed files of the checkpoint and all figures in OUT.
#
#   bench/training/go_on.sh OUT                    # an H200: 170 s for the drafter, 5 minutes in all
#   TUNE_S=150 bench/training/go_on.sh OUT         # the trunk too: 9 minutes
#   DEVICE=cpu DRAFTER_S=20 bench/training/go_on.sh OUT        # the same on a CPU, to try it
#
# CORPUS: folder of model/training/corpus.py's output; without it the drafter sees no prose and the
# trunk must not be tuned. PYTHON: one with torch, numpy, safetensors, tokenizers, msgpack, xxhash,
# rich, pillow and matplotlib; default .venv/bin/python, else python3. FOLDER: the checkpoint to go
# on from, configs/models/demo. OUT gets
#   checkpoint.tar   the files of the new checkpoint that differ from FOLDER's, its curves included
#   drafter.safetensors, p11.json, p11.png, figures.txt, run.log
set -euo pipefail
cd "$(dirname "$0")/../.."
[ $# -eq 1 ] || { sed -n '2,/^set/p' "$0" | sed '$d;s/^# \?//'; exit 2; }

out=$1
folder=${FOLDER:-configs/models/demo}
drafter_s=${DRAFTER_S:-170} tune_s=${TUNE_S:-0}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
device=${DEVICE:-cuda}
corpus=${CORPUS:+--corpus "$CORPUS"}
size="--workers 6" more="--pictures 4" anchors=4096 prompts=6
if [ "$device" = cpu ]; then size="--batch 1 --length 384 --pictures 1" more="" anchors=64 prompts=1; fi
[ "$tune_s" = 0 ] || [ -n "$corpus" ] || [ "$device" = cpu ] || { echo "TUNE_S needs CORPUS" >&2; exit 2; }

mkdir -p "$out"
out=$(cd "$out" && pwd)
exec > >(tee "$out/run.log") 2>&1
if ! "$python" -c 'import headrace.model' 2>/dev/null; then  # not installed: through links
    make --no-print-directory build/ns VENV=.
    export PYTHONPATH=$PWD/build/ns${PYTHONPATH:+:$PYTHONPATH}
fi
"$python" -c '
import importlib.util as u, sys
lack = [m for m in "torch numpy safetensors tokenizers msgpack xxhash rich PIL matplotlib".split() if not u.find_spec(m)]
sys.exit("missing Python packages: " + " ".join(lack) if lack else 0)'
export PYTHONUNBUFFERED=1
began=$SECONDS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { echo "== $((SECONDS - began)) s: $*"; }

# shellcheck disable=SC2086  # corpus and size are words
train() { "$python" -m headrace.model.training.train --config "$folder/config.json" \
    --device "$device" $corpus $size "$@"; }

weights=$folder
if [ "$tune_s" != 0 ]; then
    say "the trunk, $tune_s s: more long recall, more pictures"
    # the real choice of entries and rounded weights from the first step on, at a fifth of the rates
    train --resume "$folder" --steps 100000 --fit-seconds "$tune_s" --select-from 0 --round-from 0 \
        --rate 0.2 --mix recall=0.45 --long-recall 0.6 $more --out "$work/trunk"
    weights=$work/trunk
fi
say "the drafter, $drafter_s s"
train --resume "$weights" --stop-at 0 --steps 1 --drafter-seconds "$drafter_s" \
    --drafter-anchors $anchors --out "$work/drafter"
cp "$work/drafter/drafter.safetensors" "$out/"

say "export"
"$python" -m headrace.model.training.export --config "$folder/config.json" --weights "$weights" \
    --drafter "$work/drafter/drafter.safetensors" --out "$work/new"
(cd "$work/new" && for file in *; do cmp -s "$file" "$OLDPWD/$folder/$file" || echo "$file"; done) \
    > "$work/changed"
tar -C "$work/new" -cf "$out/checkpoint.tar" -T "$work/changed"
say "changed: $(tr '\n' ' ' < "$work/changed")"

say "P11: drafts kept, and calibration"
"$python" bench/probes/drafts.py "$work/new" --prompts $prompts --json "$out/p11.json" \
    --image "$out/p11.png" | tee "$out/figures.txt"
if [ "$tune_s" != 0 ]; then
    say "the probes that missed their lines, and what must not be lost"
    "$python" bench/probes/run.py --engine --model "$work/new" --cases 20 \
        --probes P1 P3 P5 P8 P10 P12 | tee -a "$out/figures.txt"
fi
say "done"
