"""Models by hub name: a hub that answers, its cache, and none at all; each in a process of its own."""

import os
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

LOAD = """
import sys
from klgrad.harness import models
try:
    model, tokenizer = models.load(sys.argv[1])
    print("vocabulary", model.vocabulary, len(tokenizer))
except ValueError as error:
    print("refused:", error)
"""


class Hub(SimpleHTTPRequestHandler):
    """As much of the hub as a download asks for: files of one revision, and what is not there."""

    def send_head(self):
        _, _, path = self.path.partition("/resolve/main/")
        if not self.path.startswith("/some/model/") or not (Path(self.directory) / path).is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if "/some/model" in self.path else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        self.path = "/" + path
        return super().send_head()

    def end_headers(self):
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("ETag", f'"{self.path.rpartition("/")[2]}"')
        super().end_headers()

    def log_message(self, *_):
        pass


def load(name, home, endpoint):
    """What a fresh process says, and its seconds."""
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "HF_ENDPOINT": endpoint}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", LOAD, name], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr, time.monotonic() - began


@pytest.mark.slow
def test_a_hub_name_is_downloaded_once_and_then_needs_no_hub(micro, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=str(micro)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        assert load("some/model", tmp_path, endpoint)[0] == "vocabulary 22 22"
        assert (
            "refused: model 'some/other' is neither a folder nor a hub name at hand"
            in load("some/other", tmp_path, endpoint)[0]
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert load("some/model", tmp_path, endpoint)[0] == "vocabulary 22 22"


def test_without_a_hub_one_question_is_asked_and_one_sentence_said(tmp_path):
    said, errors, _ = load("some/model", tmp_path, "http://127.0.0.1:9")
    assert said.startswith("refused: model 'some/model' is neither a folder nor a hub name at hand (")
    assert "\n" not in said
    assert "Retrying" not in errors
