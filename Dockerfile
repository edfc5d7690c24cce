# A server with the embedded model, on CPUs. For a GPU: --build-arg TORCH_INDEX=https://pypi.org/simple, and run it with
# --gpus all.
FROM python:3.11-slim
ARG TORCH=torch==2.13.0
# Wheels without CUDA. Those of PyPI bring gigabytes of it.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /slipstream
RUN useradd --create-home server
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "$TORCH" \
    && pip install --no-cache-dir '.[serve]'
USER server
RUN slipstream prepare
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"
ENTRYPOINT ["slipstream", "serve", "--host", "0.0.0.0"]
