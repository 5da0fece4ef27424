#!/usr/bin/env bash
#SBATCH --job-name=mobius
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gres=gpu:4
#SBATCH --mem=0
#SBATCH --time=08:00:00
#SBATCH --output=mobius-%j.log

# Trains on several nodes under Slurm: a pipeline on each, which share every step. Submit it in the project's folder,
# which all nodes must see, as they must see the model, the data and --save_dir:
#
#     sbatch scripts/slurm_nodes.sh configs/fine_tune.yaml [options of main.py]
#
# The words are those of train.sh; options for Slurm, such as --nodes 4, go between `sbatch` and the script.
set -euo pipefail

if [[ $# == 0 || "$1" == -* || -z "${SLURM_JOB_ID:-}" ]]; then
    echo "usage: sbatch scripts/slurm_nodes.sh CONFIG.yaml [options of main.py]" >&2
    exit 2
fi
# Slurm runs a copy of this file, from a folder of its own.
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ ! -f train.sh || ! -f scripts/environment.sh ]]; then
    echo "$PWD is not the project's folder: change to the one that has train.sh, and submit from there" >&2
    exit 2
fi
source scripts/environment.sh
mobius_environment  # once, before all nodes look for it

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [[ ${#hosts[@]} == 0 ]]; then
    echo "scontrol names no nodes of this job ($SLURM_JOB_NODELIST)" >&2
    exit 2
fi
port=$((20000 + SLURM_JOB_ID % 10000))  # two jobs may share a node
# Each task asks Slurm for its own node's number. One that fails ends the others.
exec srun --kill-on-bad-exit=1 bash -c '
    nodes=(--nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" --rdzv_endpoint "$0")
    exec bash train.sh "$@" "${nodes[@]}"
' "${hosts[0]}:$port" "$@"
