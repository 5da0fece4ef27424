#!/usr/bin/env bash
# Checks Mobius on the GPUs of this machine and prints one table last:  bash scripts/gpu_check.sh PART...
#
#   tests      pytest -m gpu (1 GPU; more where there are more)
#   exact      small models, and two layers of 7B's width, in every way that a step can run beside plain transformers with
#              torch's AdamW: losses, norms and whole updates (benchmarks/exact_runs.py). EXACT_TREE is another checkout
#              whose Mobius is trained
#   losses     20 steps of a 1.1B checkpoint, streamed, resident and mixed, against plain training on one GPU
#   messages   activations of 256 MiB between ranks
#   replicas   7B's shape as two replicas beside one pipeline, over the GPUs' links and over sockets (2 GPUs or 4); on one
#              GPU two replicas share it, over sockets
#   states     a quarter of 7B streamed with each format of optimizer states, with clipping and without; with
#              SMOLLM2 (a folder of scripts/convert_smollm2.py) also what 135M learns with each, five seeds
#   products   a quarter of 7B in bf16, fp8 and int8 beside FSDP2 with torchao; with SMOLLM2 also what 135M learns with
#              each, five seeds
#   objectives 8 layers of 7B under 24 GiB: seconds, memory and the pass before step 1 of each objective beside sft on rows
#              of as many tokens; the first loss of dpo and the first ratio of policy
#   plans      40 drawn settings planned by auto on one GPU, 4 steps each: memory and seconds beside the plan's; takes some
#              11 minutes, in calls of at most PLANS_SECONDS: what is in PLANS (default WORK/plans.jsonl) is not run again
#   several    what docs/performance.md shows of several GPUs, beside the peers: the parts SEVERAL of benchmarks/gpu.sh, each
#              at most SEVERAL_SECONDS. On four H100s the first row of a part took 50 to 95 s, later ones 25 to 35, FSDP2 40
#              to 55, DeepSpeed 90. One table of all rows in ROWS (default WORK/rows.jsonl), each beside its prediction, last
#   start      7B's shape on all GPUs by the user's command: seconds to the first step and to the first checkpoint
#   kills      10 kills -9 at random moments on two GPUs, each resumed, against a run that was left alone
#
# PYTHON (default python3) must have the requirements installed; WORK (default a new folder in /tmp) takes the files.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
WORK=${WORK:-$(mktemp -d /tmp/mobius-check.XXXX)}
GPUS=${GPUS:-$($PYTHON -c 'import torch; print(torch.cuda.device_count())')}
HOST_GIB=${HOST_GIB:-0}
mkdir -p "$WORK"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export XDG_CACHE_HOME=$WORK/cache
folders=()
failed=0

# run NAME RANKS OPTIONS...: one training run with the user's command line; its log's end is shown if it fails
run() {
    local name=$1 ranks=$2
    shift 2
    local host=()
    [ "$HOST_GIB" != 0 ] && host=(--host_memory_limit "$HOST_GIB")
    folders+=("$WORK/$name")
    local start=$SECONDS
    if $PYTHON -m torch.distributed.run --nproc_per_node "$ranks" --master_port 29502 ./main.py "${host[@]}" \
        --dataset assets/docstrings/train.jsonl --save_dir "$WORK/$name" --save_params "$WORK/params.pt" \
        --save_strategy no --save_results "$WORK/$name.txt" --overwrite_output_dir "$@" >"$WORK/$name.log" 2>&1; then
        echo "== $name: ended well after $((SECONDS - start)) s"
    else
        echo "== $name: FAILED after $((SECONDS - start)) s"
        grep -v "^step\|^W\|^  prompt" "$WORK/$name.log" | tail -n "${FAIL_LINES:-12}" | cut -c1-400
        failed=1
    fi
}

declare -A MODES=([streamed]="--use_offload --resident_stages 0" [resident]="--no_offload")
SIZE=${SIZE:-1b}
make_1b() { [ -d "$WORK/1b" ] || $PYTHON scripts/make_model.py "$SIZE" "$WORK/1b"; }

part_tests() { $PYTHON -m pytest -q -m gpu tests/gpu -p no:cacheprovider || failed=1; }

part_exact() {
    $PYTHON benchmarks/exact_runs.py ${EXACT_TREE:+--tree "$EXACT_TREE"} ${EXACT:-} || failed=1
}

part_losses() {
    make_1b
    local options="--model_path $WORK/1b --num_iterations=${STEPS:-20} --batch_size=64 --seq_length ${LENGTH:-256} --num_chunks 8"
    [ -f "$WORK/losses.json" ] || $PYTHON scripts/plain_training.py --output "$WORK/losses.json" $options \
        --dataset assets/docstrings/train.jsonl >"$WORK/plain.log" 2>&1 || { tail -n 12 "$WORK/plain.log"; failed=1; }
    local where
    for prefetch in use_prefetch no_prefetch; do
        for where in streamed resident; do
            run "1b-$GPUS-$where-$prefetch" "$GPUS" $options --num_stage=$((GPUS * 2)) --$prefetch ${MODES[$where]}
        done
    done
    run "1b-$GPUS-mixed" "$GPUS" $options --num_stage=$((GPUS * 2)) --use_offload --resident_stages 1
}

part_messages() {
    make_1b
    run "1b-$GPUS-256MiB-messages" "$GPUS" --model_path "$WORK/1b" --num_iterations 4 --batch_size 256 --seq_length 1024 \
        --num_chunks 4 --num_stages $((GPUS * 2)) --use_prefetch ${MODES[streamed]}
}

part_replicas() {
    local pipeline="--num_chunks 8 --resident_stages 0 ${REPLICAS_MOBIUS:---num_stages 32 --gpu_memory_limit 24}"
    local replicas="--num_chunks 4 --pipeline_ranks $((GPUS > 1 ? GPUS / 2 : 1))" ways=(links sockets) options way
    [ "$GPUS" = 1 ] && ways=(sockets) replicas+=" --share_gpu"
    for way in "${ways[@]}"; do
        options=(--ranks "$((GPUS > 1 ? GPUS : 2))")
        [ "$GPUS" = 1 ] && options+=(--no_mobius)
        [ "$way" = sockets ] && options+=(--env NCCL_NET=Socket --env NCCL_P2P_DISABLE=1 --env NCCL_SHM_DISABLE=1)
        $PYTHON benchmarks/benchmark.py "${REPLICAS_SIZE:-7b}" ${REPLICAS_BENCHMARK:-} "${options[@]}" --output "$WORK/replicas.jsonl" \
            --variant "replicas, $way=$replicas" --variant "replicas, bf16 sums, $way=$replicas --reduce_dtype bf16" \
            -- $pipeline || failed=1
    done
}

part_states() {
    local norm
    for norm in 1 0; do
        $PYTHON benchmarks/benchmark.py 7b --layers 8 --steps 8 --max_grad_norm $norm --output "$WORK/states.jsonl" \
            --variant bf16="--optimizer_states bf16" --variant compact="--optimizer_states compact" \
            -- --num_stages 8 --num_chunks 4 --resident_stages 0 || failed=1
    done
    [ -z "${SMOLLM2:-}" ] || $PYTHON benchmarks/learning.py "$WORK/learning" --at_once 3 -- --bf16 \
        --model_path "$SMOLLM2" --dataset assets/docstrings/train.jsonl --val_size 200 --batch_size 8 --num_chunks 2 \
        --num_stages 4 --seq_length 512 --num_train_epochs 3 --learning_rate 1e-4 --eval_strategy steps --eval_steps 20 \
        --do_eval --compile off || failed=1
}

part_products() {
    $PYTHON benchmarks/benchmark.py 7b --layers 8 --steps 10 --same_processes --output "$WORK/products.jsonl" \
        --variant fp8="--matmul_dtype fp8" --variant int8="--matmul_dtype int8" --peer fsdp2-compile \
        --peer fsdp2-rowwise --peer fsdp2-rowwise-gw-hp -- --num_stages auto --num_chunks auto || failed=1
    [ -z "${SMOLLM2:-}" ] || $PYTHON benchmarks/learning.py "$WORK/products" --option matmul_dtype --at_once 3 -- \
        --bf16 --model_path "$SMOLLM2" --dataset assets/docstrings/train.jsonl --val_size 200 --batch_size 8 \
        --num_chunks 2 --num_stages 4 --seq_length 512 --num_train_epochs 3 --learning_rate 1e-4 \
        --eval_strategy steps --eval_steps 20 --do_eval || failed=1
}

part_objectives() {
    make_1b
    $PYTHON benchmarks/objective_rows.py 7b --num_layers 8 --gpu_memory_limit 24 --teacher "$WORK/1b" \
        --objectives ${OBJECTIVES:-sft dpo kto policy distill} -- --max_grad_norm 1 || failed=1
}

part_plans() {
    $PYTHON benchmarks/plans.py "${PLANS:-$WORK/plans.jsonl}" --settings "${PLANS_SETTINGS:-40}" \
        --seconds "${PLANS_SECONDS:-480}" --workers "${PLANS_WORKERS:-4}" || failed=1
}

part_several() {
    local part
    export ROWS=${ROWS:-$WORK/rows.jsonl} PYTHON HOST_GIB
    local seconds=${SEVERAL_SECONDS:-400}
    for part in ${SEVERAL:-main clip fits 13b48 two_lora depth depth_nop2p}; do
        BENCHMARK="--same_processes --total_seconds $seconds ${BENCHMARK:-}" bash benchmarks/gpu.sh "$part" || failed=1
    done
    $PYTHON benchmarks/compare_rows.py "$ROWS" || failed=1
}

part_start() {
    $PYTHON scripts/make_model.py "${START_SIZE:-7b}" "$WORK/start-model" --config_only
    local begin
    begin=$(date +%s.%N)
    run start "$GPUS" --model_path "$WORK/start-model" --num_iterations 2 --batch_size 64 --seq_length 512 \
        --num_stages auto --num_chunks auto ${START_MOBIUS:---gpu_memory_limit 24} --save_strategy steps --save_steps 1
    $PYTHON - "$WORK/start/events.jsonl" "$begin" <<'END' || failed=1
import json, sys

for line in open(sys.argv[1]):
    event = json.loads(line)
    if event["event"] in ("step", "checkpoint", "end"):
        print(f"{event['event']} {event['step']}: {event['time'] - float(sys.argv[2]):.1f} s after the start")
END
}

part_kills() { $PYTHON scripts/kill_and_resume.py --device cuda --kills "${KILLS:-10}" --folder "$WORK" || failed=1; }

for part in "$@"; do
    echo "==== $part"
    "part_$part"
done
if [ ${#folders[@]} -gt 0 ]; then
    losses=()
    [ -f "$WORK/losses.json" ] && losses=(--losses "$WORK/losses.json")
    $PYTHON benchmarks/compare_runs.py "${folders[@]}" "${losses[@]}"
fi
exit $failed
