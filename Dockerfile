# An image that trains on the GPUs it is given:
#
#     docker build -t mobius .
#     mkdir -p output
#     docker run --rm --gpus all --ipc=host --user "$(id -u):$(id -g)" -v mobius-cache:/cache \
#         -v "$PWD/output:/mobius/output" mobius --use_offload --use_prefetch --save_dir output/save_ckpt \
#         --save_params output/finetune_params.pt --save_results output/test_result.txt
#
# --ipc=host: GPUs without peer-to-peer copies exchange activations through shared memory, of which a container has 64 MiB.
# /cache keeps downloaded models and tokenized data. With --user the results belong to you; without it the user is 1000,
# who must be able to write to mounted folders. `-e HF_TOKEN` for models behind a licence.

# Without CUDA: the wheel of torch brings its own, and the driver comes from the host. Any Debian or Ubuntu with Python
# 3.11 or later may be the base.
ARG BASE=ubuntu:24.04
FROM $BASE

# gcc and Python's headers: kernels are compiled where they run.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# For example https://download.pytorch.org/whl/cpu, whose torch is 2.5 GB smaller; without them pip's own.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY requirements.txt /mobius/
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --requirement /mobius/requirements.txt

COPY . /mobius
WORKDIR /mobius

# Any user may run the image: caches and results go where everybody may write, and a user without a name gets one.
RUN mkdir /cache && chmod 1777 /cache /mobius
ENV PATH=/opt/venv/bin:$PATH \
    MOBIUS_PYTHON=system \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache \
    USER=mobius \
    HF_HOME=/cache/huggingface \
    XDG_CACHE_HOME=/cache \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

USER 1000:1000
HEALTHCHECK --interval=60s --timeout=30s CMD ["scripts/docker_health"]
ENTRYPOINT ["scripts/docker_entry"]
