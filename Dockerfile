# A server of models and indexes: make dist && docker build -t heedful .
# docker run -p 8080:8080 -v ./run:/model:ro -v ./keys:/keys:ro heedful
FROM python:3.13-slim

# TORCH is what pip installs first: give an address of a build for the CPU to leave CUDA out.
ARG TORCH="torch>=2.11"
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 heedful
RUN pip install --no-cache-dir "$TORCH"
COPY dist/*.whl /tmp/dist/
RUN for wheel in /tmp/dist/*.whl; do pip install --no-cache-dir "$wheel[serve,search]"; done && rm -r /tmp/dist

USER heedful
WORKDIR /tmp
EXPOSE 8080
HEALTHCHECK --start-period=60s --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/ready', timeout=4)"]
ENTRYPOINT ["heedful", "serve"]
CMD ["/model", "--host", "0.0.0.0", "--api-key-file", "/keys"]
