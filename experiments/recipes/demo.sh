#!/bin/sh
# The main job on one machine: a tiny Qwen2 learns two-digit addition, first from examples, then by asynchronous GRPO.
# Run by `make demo`. Everything lands in $CORRAL_FILEROOT, else ~/corral; each run makes trials of its own. SEED=2 makes
# another demo: other orders of the data, other samples.
set -eu
bin=${BIN:-.venv/bin}
here=$(dirname "$0")
root=${CORRAL_FILEROOT:-$HOME/corral}
data=$root/demo-data
seed=${SEED:-1}
export OMP_NUM_THREADS=1

echo "== 1/3  data and an untrained model of half a million parameters -> $data"
"$bin/python" -m corral.workers.data.arithmetic --out "$data"

stamp=$(date +%Y%m%d-%H%M%S)
echo "== 2/3  supervised fine-tuning, until about half of the held-out sums is right"
"$bin/rl-submit" "$here/arithmetic_sft.yaml" --local --wait --trial "demo-$stamp" -s "seed=$seed" \
    -s "model.path=$data/model" \
    -s "dataset.path=$data/train_sft.jsonl" \
    -s "evaluation.dataset.path=$data/heldout.jsonl"

echo "== 3/3  asynchronous GRPO: generation and training at the same time, weights updated in mid-sequence"
"$bin/rl-submit" "$here/arithmetic_grpo.yaml" --local --trial "demo-$stamp" -s "seed=$seed" \
    -s "actor.path=$root/arithmetic-sft/demo-$stamp/exports/final" \
    -s "dataset.path=$data/train_grpo.jsonl" \
    -s "evaluation.dataset.path=$data/heldout.jsonl"
until "$bin/rl-status" "arithmetic-grpo/demo-$stamp" | grep -q -E '  (RUNNING|COMPLETE|FAILED|STOPPED)  '; do sleep 1; done
echo
"$bin/rl-status" "arithmetic-grpo/demo-$stamp"
echo
"$bin/rl-status" "arithmetic-grpo/demo-$stamp" --wait
"$bin/python" - "$root/arithmetic-grpo/demo-$stamp/metrics.jsonl" <<'PYTHON'
import json, sys
accuracy = [line["eval/accuracy"] for line in map(json.loads, open(sys.argv[1])) if "eval/accuracy" in line]
print(f"held-out accuracy: {accuracy[0]:.2f} after SFT, {accuracy[-1]:.2f} after GRPO")
PYTHON
echo; echo "open the page in a browser; rl-view shows a trial's while it runs"
echo; echo "wrong to the last (rl-samples arithmetic-grpo/demo-$stamp shows more):"
"$bin/rl-samples" "arithmetic-grpo/demo-$stamp" --step all --where 'reward == 0' --sort=-step -n 10
