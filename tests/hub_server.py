"""A stand-in for the Hugging Face hub on the loopback: the endpoints that huggingface_hub uses for models."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

TOKEN = "hf_writer"
READER = "hf_reader"
"""A token that may not write."""


class Hub:
    """Repositories in memory: {name: {"private": bool, "branches": {branch: [commit, ...]}}}; a commit has files."""

    def __init__(self):
        self.repositories = {}
        self.uploaded = {}
        self.requests = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def files(self, name, revision="main"):
        """Files of the last commit of a branch, or of a commit."""
        branches = self.repositories[name]["branches"]
        commits = branches.get(revision) or [
            c for all_ in branches.values() for c in all_ if c["oid"] == revision
        ]
        return commits[-1]["files"] if commits else None

    def add(self, name, private=False, **files):
        """Create a public repository with files, as others have uploaded them."""
        self.repositories[name] = {"private": private, "branches": {}}
        self.commit(name, "main", files, "by others")

    def commit(self, name, branch, files, message):
        commits = self.repositories[name]["branches"].setdefault(branch, [])
        oid = hashlib.sha1(f"{name} {branch} {len(commits)}".encode()).hexdigest()
        before = commits[-1]["files"] if commits else {}
        kept = {path: content for path, content in (before | files).items() if content is not None}
        commits.append({"oid": oid, "files": kept, "message": message})
        return oid

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, code=200, value=None, headers=(), body=None):
        body = json.dumps(value if value is not None else {}).encode() if body is None else body
        self.send_response(code)
        for key, text in headers:
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, code, kind, message):
        self.answer(
            code, {"error": message}, [("X-Error-Code", kind), ("X-Error-Message", message)]
        )

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    @property
    def token(self):
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def handle_request(self):
        data = self.body()
        path = unquote(self.path.partition("?")[0])
        self.hub.requests.append(f"{self.command} {path}")
        for pattern, method in ROUTES.items():
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                return getattr(self, method)(data, *match.groups())
        return self.answer(200 if path == "/" else 404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def repository(self, name):
        """The repository, if this user may see it; answers if not."""
        found = self.hub.repositories.get(name)
        if found is None or (found["private"] and self.token not in (TOKEN, READER)):
            self.fail(401 if not self.token else 404, "RepoNotFound", "Repository not found")
            return None
        return found

    def create(self, data):
        asked = json.loads(data)
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if self.token != TOKEN:
            return self.fail(
                401 if self.token != READER else 403,
                "",
                "You don't have the rights to create a model",
            )
        if name in self.hub.repositories:
            return self.answer(
                409,
                {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"},
            )
        self.hub.repositories[name] = {
            "private": asked.get("visibility") == "private",
            "branches": {"main": []},
        }
        return self.answer(200, {"url": f"{self.hub.url}/{name}"})

    def info(self, data, name):
        if found := self.repository(name):
            self.answer(
                200,
                {
                    "id": name,
                    "private": found["private"],
                    "tags": [],
                    "downloads": 0,
                    "siblings": [],
                },
            )

    def branch(self, data, name, branch):
        branches = self.hub.repositories[name]["branches"]
        if branch in branches:
            return self.fail(409, "", "Reference already exists")
        branches[branch] = list(branches["main"])
        return self.answer()

    def tree(self, data, name, revision):
        files = self.hub.files(name, revision) or {}
        self.answer(
            200,
            [{"type": "file", "path": path, "size": len(files[path]), "oid": ""} for path in files],
        )

    def validate(self, data):
        self.answer(200, {"errors": [], "warnings": []})

    def preupload(self, data, name, revision):
        if self.token != TOKEN:
            return self.fail(403, "", "Forbidden")
        modes = [
            {
                "path": f["path"],
                "uploadMode": "lfs" if f["path"].endswith("safetensors") else "regular",
                "oid": None,
            }
            for f in json.loads(data)["files"]
        ]
        return self.answer(200, {"files": [{**mode, "shouldIgnore": False} for mode in modes]})

    def batch(self, data, name):
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}}
            for each in json.loads(data)["objects"]
        ]
        self.answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, data, oid):
        assert hashlib.sha256(data).hexdigest() == oid
        self.hub.uploaded[oid] = data
        self.answer()

    def commit(self, data, name, revision):
        lines = [json.loads(line) for line in data.splitlines()]
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploaded[value["oid"]]
            elif line["key"] == "deletedFile":
                files[value["path"]] = None
        oid = self.hub.commit(name, revision, files, lines[0]["value"]["summary"])
        self.answer(
            200,
            {
                "commitUrl": f"{self.hub.url}/{name}/commit/{oid}",
                "commitOid": oid,
                "hookOutput": "",
            },
        )

    def resolve(self, data, name, revision, file):
        if (found := self.repository(name)) is None:
            return None
        if (files := self.hub.files(name, revision)) is None:
            return self.fail(404, "RevisionNotFound", "Invalid rev id")
        commits = []
        for all_ in found["branches"].values():
            for c in all_:
                if c["files"] is files:
                    commits.append(c)
        if file not in files:
            missing = [("X-Error-Code", "EntryNotFound"), ("X-Repo-Commit", commits[-1]["oid"])]
            return self.answer(404, {"error": "Entry not found"}, missing)
        etag = hashlib.sha256(files[file]).hexdigest()
        return self.answer(
            200, None, [("ETag", f'"{etag}"'), ("X-Repo-Commit", commits[-1]["oid"])], files[file]
        )


ROUTES = {
    r"POST /api/repos/create": "create",
    r"GET /api/models/([^/]+/[^/]+)": "info",
    r"POST /api/models/([^/]+/[^/]+)/branch/(.+)": "branch",
    r"GET /api/models/([^/]+/[^/]+)/tree/(.+)": "tree",
    r"POST /api/validate-yaml": "validate",
    r"POST /api/models/([^/]+/[^/]+)/preupload/(.+)": "preupload",
    r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch": "batch",
    r"PUT /lfs/(.+)": "upload",
    r"POST /api/models/([^/]+/[^/]+)/commit/(.+)": "commit",
    r"(?:HEAD|GET) /([^/]+/[^/]+)/resolve/([^/]+(?:/[^/]+)??)/([^/]+)": "resolve",
}
"""Patterns of requests, and what answers them."""
