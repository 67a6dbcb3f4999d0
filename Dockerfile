# ckpt-train in a container.
#
#   docker build -t automodel_ckpt .                                          # torch with CUDA
#   docker build -t automodel_ckpt --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
# What is to last stays outside of it: mount the checkpoints, the data and the model cache (docs/guides/multi-node.md).
#
#   docker run --rm --gpus all --shm-size 8g --stop-timeout 120 \
#       -v "$PWD:/work" -v "$HOME/.cache/huggingface:/root/.cache/huggingface" automodel_ckpt recipe.yaml
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH_INDEX=
WORKDIR /opt/automodel_ckpt
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY automodel_ckpt automodel_ckpt
COPY recipes recipes
COPY examples examples
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--extra-index-url=${TORCH_INDEX}} .
ENV PYTHONUNBUFFERED=1
WORKDIR /work
# No shell between: docker stop's SIGTERM reaches the launcher, which saves and ends with 75.
ENTRYPOINT ["ckpt-train"]
