"""A stand-in of the hub on 127.0.0.1: as much of its HTTP API as pushes and downloads of models use."""

import base64
import hashlib
import json
import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit


class Repositories:
    """Commits by repository, oldest first: the branch, the message, and all files at that commit."""

    def __init__(self):
        self.commits: dict[str, list[dict]] = {}
        self.url = ""

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes] | None:
        commit = self.commit(repo_id, revision)
        return None if commit is None else commit["files"]

    def commit(self, repo_id: str, revision: str) -> dict | None:
        found = [commit for commit in self.commits.get(repo_id, []) if revision in (commit["oid"], commit["branch"])]
        return found[-1] if found else None

    def add(self, repo_id: str, branch: str, lines: list[dict]) -> dict:
        history = self.commits[repo_id]
        before = self.commit(repo_id, branch) or self.commit(repo_id, "main") or {"files": {}}
        changed = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        message = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        oid = hashlib.sha1(f"{repo_id} {branch} {len(history)}".encode()).hexdigest()
        files = {**before["files"], **changed}
        history.append({"oid": oid, "branch": branch, "message": message, "changed": sorted(changed), "files": files})
        return history[-1]


class Handler(BaseHTTPRequestHandler):
    repositories: Repositories

    def log_message(self, *args):
        pass

    def reply(self, status: int, body: bytes = b"", **headers) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply_json(self, value: dict) -> None:
        self.reply(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_POST(self):
        url, repositories = urlsplit(self.path), self.repositories
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode() or self.chunks()
        if self.headers.get("Authorization") != "Bearer hf_stand_in":
            return self.reply(401)
        if url.path == "/api/repos/create":
            wanted = json.loads(body)
            repo_id = f"{wanted.get('organization') or 'someone'}/{wanted['name']}"
            if repo_id in repositories.commits:
                return self.reply(409, json.dumps({"url": f"{repositories.url}/{repo_id}"}).encode())
            repositories.commits[repo_id] = []
            return self.reply_json({"url": f"{repositories.url}/{repo_id}", "id": repo_id})
        if url.path == "/api/validate-yaml":
            return self.reply_json({"errors": [], "warnings": []})
        repo_id, action, revision = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)/(preupload|commit|branch)/(.+)", url.path
        ).groups()
        revision = unquote(revision)
        if action == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return self.reply_json({"files": [{"path": path, **modes} for path in paths]})
        if action == "branch":
            return self.reply_json({})
        pull_request = "create_pr=1" in url.query
        commit = repositories.add(
            repo_id, "refs/pr/1" if pull_request else revision, [json.loads(line) for line in body.splitlines()]
        )
        where = f"{repositories.url}/{repo_id}"
        answer = {"commitUrl": f"{where}/commit/{commit['oid']}", "commitOid": commit["oid"]}
        return self.reply_json(answer | {"pullRequestUrl": f"{where}/discussions/1" if pull_request else None})

    def chunks(self) -> str:
        """The body of a request that is sent in chunks."""
        body = b""
        while self.headers.get("Transfer-Encoding") == "chunked" and (size := int(self.rfile.readline(), 16)):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body.decode()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/(refs/pr/\d+|[^/]+)/(.+)", path)
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/(.+))?", path)
        repo_id, revision = file.groups()[:2] if file else (info[1], info[2] or "main") if info else (None, None)
        commit = self.repositories.commit(repo_id, revision) if repo_id else None
        if repo_id not in self.repositories.commits:
            return self.reply(404, X_Error_Code="RepoNotFound")
        if commit is None:
            return self.reply(404, X_Error_Code="RevisionNotFound")
        if info:
            siblings = [{"rfilename": name} for name in commit["files"]]
            return self.reply_json({"id": repo_id, "sha": commit["oid"], "siblings": siblings, "tags": []})
        if file[3] not in commit["files"]:
            return self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit["oid"])
        content = commit["files"][file[3]]
        etag = hashlib.sha256(content).hexdigest()
        return self.reply(200, content, ETag=f'"{etag}"', X_Repo_Commit=commit["oid"])

    do_HEAD = do_GET


@contextmanager
def served():
    """A server with no repositories yet; its `url` is for HF_ENDPOINT, the token is hf_stand_in."""
    repositories = Repositories()
    handler = type("HandlerOfOne", (Handler,), {"repositories": repositories})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    repositories.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield repositories
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
