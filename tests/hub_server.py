"""What if the Hugging Face Hub were on this machine? Its few routes that a download takes, on loopback."""

import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34


class Hub(ThreadingHTTPServer):
    """Repositories by name, {"ORG/NAME": {file: bytes}}, all of one commit.

    `requests` has what was asked, `sent` the bytes of files that were sent. If it `has_ranges`, parts of
    files are sent, too.
    """

    daemon_threads = True

    def __init__(self, repositories, gated):
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories = repositories
        self.gated = gated  # names of repositories
        self.requests = []
        self.sent = 0
        self.has_ranges = True
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urlsplit(self.path).path
        self.server.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, route = "/".join(parts[2:4]), parts[4:]
        else:
            repo, route = "/".join(parts[:2]), parts[2:]
        files = self.server.repositories.get(repo)
        if files is None:
            self.send(401, error="RepoNotFound")
        elif route[1:] and route[1] not in ("main", "step7", COMMIT):
            self.send(404, error="RevisionNotFound")
        elif route[:1] == ["resolve"]:
            self.send_file(repo, files, "/".join(route[2:]))
        elif route[:1] == ["tree"]:
            tree = []
            for name, content in files.items():
                tree.append({"type": "file", "path": name, "size": len(content), "oid": digest(content)})
            self.send(200, json.dumps(tree).encode())
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            self.send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())

    def send_file(self, repo, files, name):
        if repo in self.server.gated:
            return self.send(403, error="GatedRepo")
        if name not in files:
            return self.send(404, error="EntryNotFound")
        content = files[name]
        size = len(content)
        headers = {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT}
        status, asked = 200, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.server.has_ranges:
            start, last = map(int, asked.groups())
            status, content = 206, content[start : last + 1]
            headers["Content-Range"] = f"bytes {start}-{last}/{size}"
        if self.command == "GET":
            self.server.sent += len(content)
        self.send(status, content, headers)

    def send(self, status, content=b"", headers=None, error=None):
        self.send_response(status)
        if error is not None:
            self.send_header("X-Error-Code", error)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def digest(content):
    """What names a file's content: its beginning tells it."""
    return hashlib.sha1(content[: 2**20]).hexdigest()


@contextlib.contextmanager
def serving(repositories, gated=()):
    """A Hub that answers while the block runs."""
    server = Hub(repositories, gated)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
