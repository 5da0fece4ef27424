#!/usr/bin/env bash
# The measurements of docs/performance.md on the GPUs of this machine:  bash benchmarks/gpu.sh PART...
#
#   main       Llama-2-7B's shape, batch 64 x 512, all stages streamed under 12 GiB, without clipping, with each format of
#              optimizer states, beside peers
#   stale      the same beside RoundPipe, whose start takes minutes
#   clip       main with clipping 1.0, peers too
#   nop2p      7B, 64 x 512, GPUs without direct access to each other, as consumer cards are
#   fits       7B, 64 x 512, clipping, all by auto: without a limit, under 24 and 12 GiB, and in fp8
#   ablation   main with clipping, one part of Mobius switched off at a time
#   13b48      13B, 64 x 128, what fits stays under 48 GiB
#   depth      7B, 512 x 1024 under 24 GiB with clipping, depth-first by auto and with a spread head, beside peers
#   depth_nop2p  the same without direct access between GPUs
#   one_lora   Qwen2.5-14B's shape, rank 8 on all linears, 16 x 2048 tokens, one GPU under 24 GiB; the base is streamed, and
#              peers have it in page-locked memory
#   two_lora   the same step on two GPUs under 24 GiB, where the base fits, beside FSDP2 with the base on the GPUs
#   seventy_lora   Llama-2-70B's shape, 16 x 2048 tokens, on two GPUs under 24 GiB, alone
#   bases      adapters beside a base in each format, one GPU: 7B under 12 GiB, 14B under 24, and 14B with one row under
#              12; beside peft with bitsandbytes
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
SIZE=${SIZE:-7b}                                           # of all parts but 13b48 and adapters; smaller for a trial

STREAMED="--resident_stages 0"
SMALL_GPU="--gpu_memory_limit 12"
MAIN_MOBIUS=${MAIN_MOBIUS:---num_stages 36 --num_chunks 8 $STREAMED $SMALL_GPU} # also of stale, clip, nop2p and ablation
MAIN_PEERS=${MAIN_PEERS-fsdp2-offload deepspeed-zero2}
STALE_PEERS=${STALE_PEERS-roundpipe}
CLIP_PEERS=${CLIP_PEERS-fsdp2-offload}
FITS_PEERS=${FITS_PEERS-fsdp2-compile}
SIZE_13B=${SIZE_13B:-13b}
PEERS_13B48=${PEERS_13B48-fsdp2-offload deepspeed-zero2}
NOP2P_PEERS=${NOP2P_PEERS-fsdp2-offload}
MOBIUS_13B48=${MOBIUS_13B48:---num_stages 44 --num_chunks 4 --gpu_memory_limit 48}
AUTO="--num_stages auto --num_chunks auto"
DEPTH_MOBIUS=${DEPTH_MOBIUS:-$AUTO --gpu_memory_limit 24}
DEPTH_VARIANT=${DEPTH_VARIANT:-$DEPTH_MOBIUS --spread_head}
DEPTH_PEERS=${DEPTH_PEERS-fsdp2-offload deepspeed-zero2}
DEPTH_ACCUMULATIONS=${DEPTH_ACCUMULATIONS:-16}
SIZE_LORA=${SIZE_LORA:-14b}
LORA=${LORA:---use_lora --lora_rank 8 --num_chunks 8}
ONE_LORA_PEERS=${ONE_LORA_PEERS-lora-fsdp2-offload lora-zero3}
TWO_LORA_PEERS=${TWO_LORA_PEERS-lora-fsdp2-chunked}
BASES_PEERS=${BASES_PEERS-lora-bitsandbytes-chunked}
SIZE_70B=${SIZE_70B:-70b}

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
part_nop2p() {
    benchmark "$SIZE" "$MAIN_MOBIUS" --batch_size 64 --seq_length 512 --max_grad_norm 0 --env NCCL_P2P_DISABLE=1 \
        $(peers "$NOP2P_PEERS")
}
part_13b48() {
    benchmark "$SIZE_13B" "$MOBIUS_13B48" --batch_size 64 --seq_length 128 --max_grad_norm 0 --gpu_memory_limit 48 \
        $(peers "$PEERS_13B48")
}
part_depth() {
    benchmark "$SIZE" "$DEPTH_MOBIUS" --batch_size 512 --seq_length 1024 --max_grad_norm 1 --steps 4 --warmup 1 \
        --variant "spread head=$DEPTH_VARIANT" --peer_accumulations "$DEPTH_ACCUMULATIONS" $(peers "$DEPTH_PEERS") "$@"
}
part_depth_nop2p() { DEPTH_PEERS="" part_depth --env NCCL_P2P_DISABLE=1; }
part_ablation() { benchmark "$SIZE" "$MAIN_MOBIUS" --batch_size 64 --seq_length 512 --max_grad_norm 1 --ablation; }

# lora SIZE RANKS "OPTIONS OF MOBIUS" OPTIONS...   Peers get the allocator's setting that Mobius gives itself.
lora() {
    local size=$1 ranks=$2 mobius=$3
    shift 3
    RUN_SECONDS=330 HOST_GIB=0 benchmark "$size" "$LORA $mobius" --ranks "$ranks" --batch_size 16 --seq_length 2048 \
        --max_grad_norm 1 --gpu_memory_limit 24 --steps 5 --env PYTORCH_ALLOC_CONF=expandable_segments:True "$@"
}
# 31.5 GiB of host memory are 2.1 bytes for each parameter of the base and 2.6 GiB.
part_one_lora() { lora "$SIZE_LORA" 1 "--num_stages 10 --host_memory_limit 31.5" $(peers "$ONE_LORA_PEERS"); }
part_two_lora() { lora "$SIZE_LORA" 2 "--num_stages 10 --host_memory_limit 64" $(peers "$TWO_LORA_PEERS"); }
part_seventy_lora() { lora "$SIZE_70B" 2 "--num_stages 80 --host_memory_limit 180" --timeout 540; }
# base SIZE GIB ROWS
base() {
    local formats=()
    for format in fp8 int8 nf4; do formats+=(--variant "$format=--base_dtype $format"); done
    RUN_SECONDS=330 HOST_GIB=0 benchmark "$1" "--use_lora --lora_rank 8 $AUTO" --ranks 1 --batch_size "$3" \
        --seq_length 2048 --max_grad_norm 1 --gpu_memory_limit "$2" --steps 5 "${formats[@]}" $(peers "$BASES_PEERS") \
        --env PYTORCH_ALLOC_CONF=expandable_segments:True
}
part_bases() { base 7b 12 16 && base "$SIZE_LORA" 24 16 && base "$SIZE_LORA" 12 1; }

failed=0
for part in "$@"; do
    echo "==== $part"
    "part_$part" || failed=1
done
exit $failed
