"""One file a participant. Each builds the model of a shape and serves steps (see serve.py); run in its own process, peers in
.venv-bench."""
