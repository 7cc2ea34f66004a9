# The server: `ragfence serve`, without root. compose.yaml runs it with Valkey and an S3 server.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
RUN pip install --no-cache-dir uv
WORKDIR /src
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY ragfence ragfence
# What uv.lock names, into an environment that does not need the sources.
RUN UV_PROJECT_ENVIRONMENT=/opt/ragfence uv sync --frozen --no-editable --no-cache \
    --extra api --extra redis --extra s3 --extra lance --extra audit

FROM python:${PYTHON}-slim
RUN useradd --system --uid 10001 --home-dir /var/lib/ragfence --create-home ragfence
COPY --from=build /opt/ragfence /opt/ragfence
COPY pipelines/ragfence.yml /etc/ragfence.yml
ENV PATH=/opt/ragfence/bin:$PATH RAGFENCE_POLICY=/etc/ragfence.yml PYTHONUNBUFFERED=1
USER 10001
WORKDIR /var/lib/ragfence
EXPOSE 8080
# SIGTERM lets requests in progress finish; give the container more than these 35 s, and 10 s for the rest.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/healthz', timeout=3)"]
ENTRYPOINT ["ragfence", "serve", "--host", "0.0.0.0", "--port", "8080", "--drain", "5", "--shutdown-grace", "30"]
