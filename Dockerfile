# The trainers and the command line, at the versions of constraints.txt; docs/install.md says how to run it.
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime

# Triton compiles what launches a kernel, with a C compiler and Python's headers. The distribution keeps one version.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1001 --create-home --home-dir /data trainer

WORKDIR /opt/liger_trainer
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY liger_trainer liger_trainer
COPY kernels kernels
COPY callbacks callbacks
COPY configs configs
COPY recipes recipes
COPY benchmarks benchmarks
# The base image has one Python, that of the distribution, into which pip installs only when told to.
RUN python -m pip install --no-cache-dir --break-system-packages --constraint constraints.txt '.[train]'

USER 1001
# Also the home of a user given by `docker run --user`: what is downloaded and compiled is cached there.
ENV HOME=/data
WORKDIR /data
ENTRYPOINT ["liger-trainer"]
CMD ["doctor"]
