# CPU:     docker build -t moe-train .
# NVIDIA:  docker build -t moe-train:cuda --build-arg BASE=nvcr.io/nvidia/pytorch:26.01-py3 --build-arg INSTALL_TORCH=no .
# Run:     docker run --rm -v "$PWD/runs:/app/runs" moe-train pretrain +experiment=demo run.dir=runs/demo
ARG BASE=python:3.11-slim
FROM ${BASE}

# yes: install the torch of constraints.txt; no: keep the one of the base image, and check that it is new enough.
ARG INSTALL_TORCH=yes
ARG UID=1000

WORKDIR /opt/moe_train
COPY . .
RUN if [ "$INSTALL_TORCH" = yes ]; then \
      pip install --no-cache-dir --constraint constraints.txt torch '.[data]'; \
    else \
      python -c 'import torch; print(f"torch=={torch.__version__}")' > /tmp/torch.txt \
      && pip install --no-cache-dir --constraint /tmp/torch.txt '.[data]' \
      && rm /tmp/torch.txt; \
    fi \
    && (id -u "$UID" >/dev/null 2>&1 || useradd --create-home --uid "$UID" trainer) \
    && mkdir -p /app /cache \
    && chown "$UID" /app /cache

ENV MOE_TRAIN_CACHE=/cache \
    PYTHONUNBUFFERED=1
USER ${UID}
WORKDIR /app
ENTRYPOINT ["moe-train"]
CMD ["--help"]
