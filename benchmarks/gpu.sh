#!/usr/bin/env bash
# The measurements of docs/performance.md on the GPUs of this machine:  bash benchmarks/gpu.sh PART...
#
#   main       Llama-2-7B's shape, batch 64 x 512, all stages streamed under 12 GiB, without clipping, with each format of
#              optimizer states, beside peers
#   stale      the same beside RoundPipe, whose start takes minutes
#   clip       main with clipping 1.0, peers too
#   stages     main with a stage per layer, and with embedding and head in stages of their own
#   long       7B, 64 x 2048
#   13b        Llama-2-13B's shape, 64 x 128
#   nop2p      7B, 64 x 512, GPUs without direct access to each other, as consumer cards are
#   resident   7B, 64 x 512, everything in GPU memory
#   fits       7B, 64 x 512, clipping, all by auto: without a limit, under 24 and 12 GiB, and in fp8
#   ablation   main with clipping, one part of Mobius switched off at a time
#   memory     7B, 64 x 512, what fits stays: limits of 12 to 80 GiB and none, beside peers
#   13b48      13B, 64 x 128, what fits stays under 48 GiB
#   30b        Llama-30B's shape, 64 x 512, under 24 GiB per GPU; needs 403 GiB of host memory
#   depth      7B, 512 x 1024 under 24 GiB with clipping, depth-first by auto and with a spread head, beside peers
#   depth_nop2p  the same without direct access between GPUs
#
# PYTHON (default python3) must have the requirements installed. ROWS (default rows.jsonl) is appended to, row by
# row. Each part takes minutes; RUN_SECONDS ends a run that hangs. Whatever is set below can be set in the environment.
# Lists of peers may be empty. Stages are for four GPUs: 36 of 7B are too many for two.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
ROWS=${ROWS:-rows.jsonl}
RUN_SECONDS=${RUN_SECONDS:-240}
STEPS=${STEPS:-8}
HOST_GIB=${HOST_GIB:-0}                                    # 0: what is available; else Mobius's --host_memory_limit
BENCHMARK=${BENCHMARK:-}                                   # more options of benchmark.py for all parts
MOBIUS=${MOBIUS:-}                                         # more options of Mobius for all parts
SIZE=${SIZE:-7b}                                           # of all parts but 13b; smaller for a trial

STREAMED="--resident_stages 0"
SMALL_GPU="--gpu_memory_limit 12"
MAIN_MOBIUS=${MAIN_MOBIUS:---num_stages 36 --num_chunks 8 $STREAMED $SMALL_GPU} # also of stale, clip, nop2p and ablation
MAIN_PEERS=${MAIN_PEERS-fsdp2-offload deepspeed-zero2}
STALE_PEERS=${STALE_PEERS-roundpipe}
CLIP_PEERS=${CLIP_PEERS-fsdp2-offload}
FITS_PEERS=${FITS_PEERS-fsdp2-compile}
STAGES_VARIANT=${STAGES_VARIANT:---num_stages 32}
LONG_MOBIUS=${LONG_MOBIUS:---num_stages 32 --num_chunks 16 $STREAMED}
LONG_VARIANT=${LONG_VARIANT:---no_offload --resident_stages all --recompute full}
LONG_PEERS=${LONG_PEERS-fsdp2-offload}
LONG_ACCUMULATIONS=${LONG_ACCUMULATIONS:-4}
SIZE_13B=${SIZE_13B:-13b}
MOBIUS_13B=${MOBIUS_13B:---num_stages 44 --num_chunks 4 $STREAMED}
PEERS_13B=${PEERS_13B-fsdp2-offload deepspeed-zero2}
NOP2P_PEERS=${NOP2P_PEERS-fsdp2-offload}
RESIDENT_MOBIUS=${RESIDENT_MOBIUS:---num_stages 32 --num_chunks 8 --no_offload --recompute none --loss_chunk_tokens 8192}
RESIDENT_PEERS=${RESIDENT_PEERS-fsdp2-compile}
MEMORY_MOBIUS=${MEMORY_MOBIUS:---num_stages 36 --num_chunks auto}
MEMORY_LIMITS=${MEMORY_LIMITS:-12 16 24 32 48 80}
MEMORY_PEERS=${MEMORY_PEERS-fsdp2-offload deepspeed-zero2}
MOBIUS_13B48=${MOBIUS_13B48:---num_stages 44 --num_chunks 4 --gpu_memory_limit 48}
SIZE_30B=${SIZE_30B:-30b}
AUTO="--num_stages auto --num_chunks auto"
DEPTH_MOBIUS=${DEPTH_MOBIUS:-$AUTO --gpu_memory_limit 24}
DEPTH_VARIANT=${DEPTH_VARIANT:-$DEPTH_MOBIUS --spread_head}
DEPTH_PEERS=${DEPTH_PEERS-fsdp2-offload deepspeed-zero2}
DEPTH_ACCUMULATIONS=${DEPTH_ACCUMULATIONS:-16}
MOBIUS_30B=${MOBIUS_30B:---num_stages 64 --num_chunks 8 --gpu_memory_limit 24}

# peers NAME...: the words that ask benchmark.py for them
peers() { for name in $1; do printf -- '--peer %s ' "$name"; done; }

# benchmark SIZE "OPTIONS OF MOBIUS" OPTIONS...
benchmark() {
    local size=$1 mobius=$2
    shift 2
    [ "$HOST_GIB" != 0 ] && mobius="$mobius --host_memory_limit $HOST_GIB"
    # shellcheck disable=SC2086 # options are words
    $PYTHON benchmarks/benchmark.py "$size" --steps "$STEPS" --timeout "$RUN_SECONDS" --output "$ROWS" $BENCHMARK "$@" \
        -- $mobius $MOBIUS
}

# shellcheck disable=SC2046 # so are the words of peers
part_main() {
    benchmark "$SIZE" "$MAIN_MOBIUS" --batch_size 64 --seq_length 512 --max_grad_norm 0 \
        --variant "bf16 states=--optimizer_states bf16" --variant "compact states=--optimizer_states compact" \
        $(peers "$MAIN_PEERS")
}
part_stale() { benchmark "$SIZE" "$MAIN_MOBIUS" --batch_size 64 --seq_length 512 --max_grad_norm 0 $(peers "$STALE_PEERS"); }
part_clip() {
    benchmark "$SIZE" "$MAIN_MOBIUS" --batch_size 64 --seq_length 512 --max_grad_norm 1 \
        --variant "bf16 states=--optimizer_states bf16" --variant "compact states=--optimizer_states compact" \
        $(peers "$CLIP_PEERS")
}
part_fits() {
    benchmark "$SIZE" "$AUTO" --batch_size 64 --seq_length 512 --max_grad_norm 1 --variant "24 GiB=--gpu_memory_limit 24" \
        --variant "12 GiB=--gpu_memory_limit 12" --variant "fp8=--matmul_dtype fp8" \
        --variant "24 GiB, fp8=--gpu_memory_limit 24 --matmul_dtype fp8" $(peers "$FITS_PEERS")
}
part_stages() {
    benchmark "$SIZE" "$MAIN_MOBIUS" --batch_size 64 --seq_length 512 --max_grad_norm 0 \
        --variant "a stage per layer=$STAGES_VARIANT" --variant "the same, clipping 1.0=$STAGES_VARIANT --max_grad_norm 1"
}
part_long() {
    benchmark "$SIZE" "$LONG_MOBIUS" --batch_size 64 --seq_length 2048 --max_grad_norm 0 \
        --variant "no offload=$LONG_VARIANT" --peer_accumulations "$LONG_ACCUMULATIONS" $(peers "$LONG_PEERS")
}
part_13b() { benchmark "$SIZE_13B" "$MOBIUS_13B" --batch_size 64 --seq_length 128 --max_grad_norm 0 $(peers "$PEERS_13B"); }
part_nop2p() {
    benchmark "$SIZE" "$MAIN_MOBIUS" --batch_size 64 --seq_length 512 --max_grad_norm 0 --env NCCL_P2P_DISABLE=1 \
        $(peers "$NOP2P_PEERS")
}
part_resident() {
    benchmark "$SIZE" "$RESIDENT_MOBIUS" --batch_size 64 --seq_length 512 --max_grad_norm 0 $(peers "$RESIDENT_PEERS")
}
part_memory() {
    local variants=()
    for limit in $MEMORY_LIMITS; do variants+=(--variant "$limit GiB=--gpu_memory_limit $limit"); done
    benchmark "$SIZE" "$MEMORY_MOBIUS" --batch_size 64 --seq_length 512 --max_grad_norm 0 "${variants[@]}" \
        $(peers "$MEMORY_PEERS")
}
part_13b48() {
    benchmark "$SIZE_13B" "$MOBIUS_13B48" --batch_size 64 --seq_length 128 --max_grad_norm 0 --gpu_memory_limit 48 \
        $(peers "$PEERS_13B")
}
part_30b() { benchmark "$SIZE_30B" "$MOBIUS_30B" --batch_size 64 --seq_length 512 --max_grad_norm 1; }
part_depth() {
    benchmark "$SIZE" "$DEPTH_MOBIUS" --batch_size 512 --seq_length 1024 --max_grad_norm 1 --steps 4 --warmup 1 \
        --variant "spread head=$DEPTH_VARIANT" --peer_accumulations "$DEPTH_ACCUMULATIONS" $(peers "$DEPTH_PEERS") "$@"
}
part_depth_nop2p() { DEPTH_PEERS="" part_depth --env NCCL_P2P_DISABLE=1; }
part_ablation() { benchmark "$SIZE" "$MAIN_MOBIUS" --batch_size 64 --seq_length 512 --max_grad_norm 1 --ablation; }

failed=0
for part in "$@"; do
    echo "==== $part"
    "part_$part" || failed=1
done
exit $failed
