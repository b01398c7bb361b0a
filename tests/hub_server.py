"""What if the Hugging Face Hub were on this machine? Its few routes that a download takes, on loopback."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34


class Hub(ThreadingHTTPServer):
    """Repositories by name, {"ORG/NAME": {file: bytes}}, all of one commit; `requests` has what was asked."""

    daemon_threads = True

    def __init__(self, repositories, gated):
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories = repositories
        self.gated = gated  # names of repositories
        self.cut_once = set()  # files that end in the middle when they are asked for first
        self.broken = set()  # files that cannot be sent
        self.requests = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    """The answer to a request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Say nothing on stderr."""

    def do_HEAD(self):
        """As the answer to a GET, without what it holds."""
        self.do_GET()

    def do_GET(self):
        """A repository's description, the tree of its files, or one of these."""
        path = urlsplit(self.path).path
        self.server.requests.append((self.command, path, self.headers.get("Range")))
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
        """A file, or the rest of it that a Range asks for."""
        if repo in self.server.gated:
            return self.send(403, error="GatedRepo")
        if name not in files:
            return self.send(404, error="EntryNotFound")
        if self.command == "GET" and name in self.server.broken:
            return self.send(500)
        content = files[name]
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {"ETag": f'"{digest(content)}"', "X-Repo-Commit": COMMIT}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        end = len(content)
        if self.command == "GET" and name in self.server.cut_once:
            self.server.cut_once.remove(name)
            end //= 2
        self.send(206 if begin else 200, content[begin:], headers, end - begin)

    def send(self, status, content=b"", headers=None, count=None, error=None):
        """A status, headers and the first `count` bytes of the content, after which the line goes dead."""
        self.send_response(status)
        if error is not None:
            self.send_header("X-Error-Code", error)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:count])
            self.close_connection = count is not None and count < len(content)


def digest(content):
    """What names a file's content."""
    return hashlib.sha1(content).hexdigest()


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
