#!/usr/bin/env bash
# Adapters beside peft with DeepSpeed's ZeRO-3 and with FSDP2:  bash benchmarks/lora.sh one|chunked|two|seventy...
#
#   one      Qwen2.5-14B's shape, rank 8 on all linears, 16 x 2048 tokens, one GPU limited to 24 GiB; the base is
#            streamed, and peers have it in page-locked memory
#   chunked  one, peers computing the loss in chunks of 2048 tokens, which lets them take larger microbatches
#   two      one's step on two GPUs limited to 24 GiB, where the base fits, beside FSDP2 with the base on the GPUs
#   seventy  Llama-2-70B's shape, 16 x 2048 tokens, on two GPUs limited to 24 GiB, alone
#
# Each part ends within TOTAL_SECONDS with one table, and below it what was predicted and which microbatch each peer
# chose. PYTHON (default python3) must have the requirements and peft installed; ZeRO-3 needs deepspeed 0.19.8, else its
# row says so. ROWS (default rows.jsonl) is appended to. Whatever is set below can be set in the environment.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
ROWS=${ROWS:-rows.jsonl}
TOTAL_SECONDS=${TOTAL_SECONDS:-540}
RUN_SECONDS=${RUN_SECONDS:-330}
STEPS=${STEPS:-5}
WARMUP=${WARMUP:-2}
BATCH_SIZE=${BATCH_SIZE:-16}
SEQ_LENGTH=${SEQ_LENGTH:-2048}
GPU_GIB=${GPU_GIB:-24}                                     # of each GPU that any system may take; 0: no limit
SIZE=${SIZE:-14b}                                          # of all parts but seventy; smaller for a trial
SIZE_70B=${SIZE_70B:-70b}
BENCHMARK=${BENCHMARK:-}                                   # more options of benchmark.py for all parts
MOBIUS=${MOBIUS:-}                                         # more options of Mobius for all parts

# 31.5 GiB of host memory are 2.1 bytes for each parameter of the base and 2.6 GiB.
ONE_MOBIUS=${ONE_MOBIUS:---num_stages 10 --num_chunks 8 --host_memory_limit 31.5}
ONE_PEERS=${ONE_PEERS-lora-fsdp2-offload lora-zero3}
CHUNKED_PEERS=${CHUNKED_PEERS-lora-fsdp2-offload-chunked lora-zero3-chunked}
TWO_MOBIUS=${TWO_MOBIUS:---num_stages 10 --num_chunks 8 --host_memory_limit 64} # all of the base stays on the GPUs
TWO_PEERS=${TWO_PEERS-lora-fsdp2-chunked}                   # the one in docs/performance.md
SEVENTY_MOBIUS=${SEVENTY_MOBIUS:---num_stages 80 --num_chunks 8 --host_memory_limit 180}

# peers NAME...: the words that ask benchmark.py for them
peers() { for name in $1; do printf -- '--peer %s ' "$name"; done; }

# benchmark SIZE RANKS "OPTIONS OF MOBIUS" OPTIONS...   Peers get the allocator's setting that Mobius gives itself.
benchmark() {
    local size=$1 ranks=$2 mobius=$3
    shift 3
    [ "$GPU_GIB" != 0 ] && set -- --gpu_memory_limit "$GPU_GIB" "$@"
    # shellcheck disable=SC2086 # options are words
    $PYTHON benchmarks/benchmark.py "$size" --ranks "$ranks" --batch_size "$BATCH_SIZE" --seq_length "$SEQ_LENGTH" \
        --steps "$STEPS" --warmup "$WARMUP" --max_grad_norm 1 --timeout "$RUN_SECONDS" \
        --env PYTORCH_ALLOC_CONF=expandable_segments:True --total_seconds "$TOTAL_SECONDS" --output "$ROWS" "$@" \
        $BENCHMARK -- --use_lora --lora_rank 8 $mobius $MOBIUS
}

# shellcheck disable=SC2046 # so are the words of peers
part_one() { benchmark "$SIZE" 1 "$ONE_MOBIUS" $(peers "$ONE_PEERS"); }
part_chunked() { benchmark "$SIZE" 1 "$ONE_MOBIUS" $(peers "$CHUNKED_PEERS"); }
part_two() { benchmark "$SIZE" 2 "$TWO_MOBIUS" $(peers "$TWO_PEERS"); }
part_seventy() { benchmark "$SIZE_70B" 2 "$SEVENTY_MOBIUS" --timeout "$TOTAL_SECONDS"; }

[ $# -gt 0 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
for part in "$@"; do
    case $part in one | chunked | two | seventy) ;; *)
        echo "$0: no part $part; there are: one chunked two seventy" >&2
        exit 2
        ;;
    esac
done
failed=0
for part in "$@"; do
    echo "==== $part"
    "part_$part" || failed=1
done
exit $failed
