#!/usr/bin/env bash
#SBATCH --job-name=mobius
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --gres=gpu:4
#SBATCH --mem=0
#SBATCH --time=08:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=mobius-%j.log

# Trains under Slurm in as many turns as the time limit makes of a run. Submit it in the project's folder:
#
#     sbatch scripts/slurm_requeue.sh configs/long_run.yaml [options of main.py]
#
# The words are those of train.sh; options for Slurm go between `sbatch` and the script. A turn goes on from the newest
# checkpoint in --save_dir, if there is one, and ends in one of these ways:
#
#     Slurm's USR1, 600 s before the limit    the run gets SIGTERM, saves and ends; the job is queued again
#     --max_run_time is over                  the run saves and ends; the job is queued again
#     the watchdog ends the run (code 75)     the job is queued again
#     the run is done, or ends by an error    the job ends, with the run's exit code
#     SIGTERM (scancel --full, preemption)    the run saves if it has the time; queuing again is left to Slurm
#
# A turn without a new checkpoint never queues the job again. The 600 s must be longer than a step and a save together.
set -euo pipefail

if [[ $# == 0 || "$1" == -* || -z "${SLURM_JOB_ID:-}" ]]; then
    echo "usage: sbatch scripts/slurm_requeue.sh CONFIG.yaml [options of main.py]" >&2
    exit 2
fi
# Slurm runs a copy of this file, from a folder of its own.
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ ! -f train.sh || ! -f scripts/environment.sh ]]; then
    echo "$PWD is not the project's folder: change to the one that has train.sh, and submit from there" >&2
    exit 2
fi
source scripts/environment.sh
mobius_environment

# save_dir, whether a run that ends well may not be done, whether the first turn is told itself how to start, and words
# that name save_dir to later turns.
mapfile -d '' -t settings < <("$MOBIUS_PYTHON_BIN" - "$@" <<'PYTHON_SCRIPT'
import os
import sys

from mobius.config.cli import given_options, parse_args
from mobius.errors import ConfigError

words = ["--config", *sys.argv[1:]]
try:
    config = parse_args(words)
    if config.evaluation.do_train and (not config.saving.is_on or config.saving.save_only_model):
        raise ConfigError(
            "`--save_strategy no` and `--save_only_model` leave nothing that a next turn could go on from; remove them"
        )
except ConfigError as error:
    sys.stderr.write(f"{error}\n")
    sys.exit(error.exit_code)
ends_by_time = config.evaluation.do_train and config.saving.max_run_time is not None
named = config.saving.resume_from_checkpoint
is_told = config.output.overwrite_output_dir or named is not None
save_dir, names_it = config.output.save_dir, []
if named is not None and named.lower() != "true" and "save_dir" not in given_options(words):
    save_dir = os.path.dirname(named.rstrip("/")) or "."  # the run goes on where that checkpoint is
    names_it = ["--save_dir", save_dir]
for word in (save_dir, "yes" if ends_by_time else "no", "yes" if is_told else "no", *names_it):
    sys.stdout.buffer.write(os.fsencode(word) + b"\0")
PYTHON_SCRIPT
)
wait "$!"  # a problem has been printed; `set -e` ends here with its exit code
save_dir="${settings[0]}" ends_by_time="${settings[1]}" is_told="${settings[2]}"

# Prints a line for each checkpoint; one that was killed while it was written first has an empty checkpoint.json.
checkpoints() {
    local mark
    for mark in "$save_dir"/checkpoint-*/checkpoint.json; do
        if [[ -s "$mark" && "$mark" =~ /checkpoint-[0-9]+(\.partial|\.replaced)?/checkpoint\.json$ ]]; then
            stat -c '%n %i %y' "$mark"
        fi
    done
}

# Prints what tells one result of a run from another; nothing where there is none.
result() {
    stat -c '%i %y' "$save_dir/config.json" 2>/dev/null || true
}

checkpoints_before="$(checkpoints)" result_before="$(result)"
resume=()
if [[ -n "$checkpoints_before" && ( "${SLURM_RESTART_COUNT:-0}" != 0 || "$is_told" == no ) ]]; then
    resume=("${settings[@]:3}" --resume_from_checkpoint true)
fi

run="" asked="" num_signals=0
pass_on() {
    num_signals=$((num_signals + 1))
    if [[ -z "$asked" ]]; then  # a second one would end a run that saves
        asked="$1"
        if [[ -n "$run" ]]; then kill -TERM "$run" 2>/dev/null || true; fi
    fi
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM
bash train.sh "$@" "${resume[@]}" &
run=$!
if [[ -n "$asked" ]]; then kill -TERM "$run" 2>/dev/null || true; fi
while :; do  # a signal ends `wait` before the run
    before=$num_signals code=0
    wait "$run" || code=$?
    [[ $num_signals != "$before" ]] || break
done

if [[ $code == 0 && ( "$ends_by_time" == no || "$(result)" != "$result_before" ) ]]; then
    echo "slurm_requeue.sh: the run is done" >&2
    exit 0
fi
is_cut=no
case "$code:$asked" in
    130:USR1 | 143:USR1 | 0:USR1 | 0: | 75:USR1 | 75:) is_cut=yes ;;
esac
if [[ $is_cut == no ]]; then
    echo "slurm_requeue.sh: the run ended with code $code; the job is not queued again" >&2
    exit "$code"
fi
if [[ "$(checkpoints)" == "$checkpoints_before" ]]; then
    echo "slurm_requeue.sh: this turn came to no new checkpoint, so the job is not queued again. Give turns more time" \
        "(sbatch --time), ask for the signal earlier (sbatch --signal=B:USR1@SECONDS), or save more often" \
        "(--save_steps)." >&2
    exit $((code == 0 ? 1 : code))
fi
echo "slurm_requeue.sh: job $SLURM_JOB_ID is queued again" >&2
if ! scontrol requeue "$SLURM_JOB_ID"; then
    echo "slurm_requeue.sh: Slurm does not queue the job again. To go on: sbatch scripts/slurm_requeue.sh $*" >&2
    exit 1
fi
