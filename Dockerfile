# The image of a job on Kubernetes, or under Slurm with containers:
#     docker build -t elastic-platform:0.1.0 .                              for GPUs; it runs without them too
#     docker build -t elastic-platform:0.1.0 --build-arg DEVICE=cpu .       for CPUs alone: a tenth of the size
# Behind a proxy: --build-arg PIP_INDEX_URL=URL, and --build-arg CA="$(cat FILE.pem)" for a certificate to trust.
ARG DEVICE=cuda
ARG BASE=python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS base
# PEM, or none; the image trusts it afterwards too
ARG CA=
RUN if [ -n "$CA" ]; then \
        mkdir -p /usr/local/share/ca-certificates \
        && printf '%s\n' "$CA" > /usr/local/share/ca-certificates/build.crt; \
    fi
# wget: KubeRay's probes; procps: Ray's ps; a compiler: torch.compile; the user has the id that the jobs run as
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ gcc procps wget \
    && update-ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home trainer
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CERT=/etc/ssl/certs/ca-certificates.crt PYTHONUNBUFFERED=1
WORKDIR /opt/elastic-platform
COPY requirements.txt .

FROM base AS torch-cuda
ARG PIP_INDEX_URL=https://pypi.org/simple
RUN pip install --no-cache-dir "$(grep ^torch== requirements.txt)"

FROM base AS torch-cpu
# PyTorch's own index, which has builds without CUDA
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep ^torch== requirements.txt)"

# hadolint ignore=DL3006
FROM torch-${DEVICE}
ARG PIP_INDEX_URL=https://pypi.org/simple
# The versions that the tests ran with, without the tools of development; Ray with its dashboard, by which KubeRay
# submits jobs, asks for their state and scrapes metrics.
RUN sed -e '/^# For development/,$d' -e 's/^ray==/ray[default]==/' requirements.txt > installed.txt \
    && pip install --no-cache-dir --requirement installed.txt
COPY . /opt/elastic-platform/source
RUN pip install --no-cache-dir --no-deps ./source && rm -rf source
USER 1000
WORKDIR /home/trainer
