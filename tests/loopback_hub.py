"""Stand in for the Hugging Face Hub on the loopback interface, in memory.

It is not the Hub: it answers the calls that the real `huggingface_hub` client makes to create a model repository, push
to it and load from it, and those of the datasets library to load a dataset. It does so over real HTTP, with revisions
as commits. It has no web pages, no storage of large files (LFS, Xet), no content network and no rate limits, and one
token that may do everything.

The client reads its endpoint when `huggingface_hub` is imported: clients run in subprocesses, with
`LoopbackHub.environment`, or in this process where `LoopbackHub.use` has led the commands here.
"""

import base64
import hashlib
import json
import ssl
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from threading import RLock, Thread
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import constants


TOKEN = "hf_loopback"
# Every client reads the certificates of all authorities, to speak HTTP.
ssl_context = cache(ssl.create_default_context)


class HubError(Exception):
    """Report anything but success; the client tells its exceptions apart by `code`."""

    def __init__(self, status: int, message: str, code: str | None = None, commit: str | None = None, **answer):
        super().__init__(message)
        self.answer = {"error": message, **answer}
        headers = {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit}
        self.status, self.headers = status, {name: value for name, value in headers.items() if value}


def oid(content: bytes) -> str:
    """Return git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """Hold commits by id, each the content of its files by path, and references to them by name."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    pull_requests: int = 0

    def commit(self, reference: str, files: dict[str, bytes]) -> str:
        """Move `reference` to a new commit of `files`, whose id follows from its parent and its content."""
        content = [
            self.references.get(reference, ""),
            *(f"{path} {oid(file)}" for path, file in sorted(files.items())),
        ]
        sha = hashlib.sha1("\n".join(content).encode()).hexdigest()
        self.commits[sha] = files
        self.references[reference] = sha
        return sha

    def resolve(self, revision: str) -> str:
        sha = self.references.get(revision, revision)
        if sha not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha


class LoopbackHub:
    """Stand in for the Hub, and serve while used as a context manager.

    `calls` holds method and path of every request so far. While `fault` is (method, path, status), a request of this
    method whose path contains that path gets this status.
    """

    def __init__(self):
        self.repositories: dict[str, Repository] = {}
        self.calls: list[tuple[str, str]] = []
        self.fault: tuple[str, str, int] | None = None
        self.lock = RLock()
        self.server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "LoopbackHub":
        # The server looks this often whether it shall end.
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home) -> dict[str, str]:
        """Return variables for a client process whose caches are below `home`."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(home),
            "HF_MODULES_CACHE": str(home / "modules"),
        }

    def use(self, monkeypatch, home) -> None:
        """Lead the commands of this process here, with caches below `home` and retries that do not wait."""
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, self.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        if "datasets" in sys.modules:
            monkeypatch.setattr("datasets.config.HF_ENDPOINT", self.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        monkeypatch.setattr(ssl, "create_default_context", ssl_context)

    def add(self, repo_id: str, directory) -> str:
        """Put the files of `directory` into a new public repository, without HTTP, and return the commit.

        `repo_id` is that of a model, or of a dataset behind "datasets/".
        """
        files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
        repository = self.repositories[repo_id] = Repository(private=False)
        return repository.commit("main", {name: path.read_bytes() for name, path in files.items()})

    def head(self, repo_id: str) -> dict[str, bytes]:
        """Return the files at the newest commit of a repository's main branch."""
        repository = self.repositories[repo_id]
        return repository.commits[repository.references["main"]]

    # Each of these functions answers one kind of request.

    def create(self, body: dict) -> dict:
        repo_id = f"{body['organization']}/{body['name']}" if body.get("organization") else f"me/{body['name']}"
        if repo_id in self.repositories:
            raise HubError(409, "You already created this model repo", url=f"{self.endpoint}/{repo_id}")
        private = body.get("private") or body.get("visibility") == "private"
        repository = self.repositories[repo_id] = Repository(private=bool(private))
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
        return {"url": f"{self.endpoint}/{repo_id}", "name": repo_id}

    def info(self, repo_id: str, repository: Repository, revision: str) -> dict:
        sha = repository.resolve(revision)
        siblings = [{"rfilename": path} for path in sorted(repository.commits[sha])]
        return {"id": repo_id, "sha": sha, "private": repository.private, "tags": [], "siblings": siblings}

    def tree(self, repository: Repository, revision: str, folder: str, recursive: bool) -> list[dict]:
        """List the files and folders in `folder`, those of its folders too if `recursive`."""
        sha = repository.resolve(revision)
        inside = f"{folder}/" if folder else ""
        files = {path: content for path, content in repository.commits[sha].items() if path.startswith(inside)}
        if folder and not files:
            raise HubError(404, f"{folder} does not exist on {revision!r}", "EntryNotFound", commit=sha)
        listing = {}
        for path, content in sorted(files.items()):
            for parent in reversed(PurePosixPath(path).parents):
                if str(parent).startswith(inside) and str(parent) != ".":
                    listing[str(parent)] = {"type": "directory", "path": str(parent), "oid": sha}
            listing[path] = {"type": "file", "path": path, "size": len(content), "oid": oid(content)}
        return [entry for path, entry in listing.items() if recursive or "/" not in path.removeprefix(inside)]

    def preupload(self, repository: Repository, revision: str, body: dict) -> dict:
        there = repository.commits[repository.resolve(revision)]
        names = [file["path"] for file in body["files"]]
        oids = {name: oid(there[name]) if name in there else None for name in names}
        common = {"uploadMode": "regular", "shouldIgnore": False}
        return {"files": [{"path": name, "oid": oids[name], **common} for name in names]}

    def commit(self, repo_id: str, repository: Repository, reference: str, lines: list[dict], create_pr: bool) -> dict:
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit", repository.references[reference]) != repository.references[reference]:
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repository.commits[repository.references[reference]])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        answer = {"success": True}
        if create_pr:
            repository.pull_requests += 1
            number = repository.pull_requests
            repository.references[f"refs/pr/{number}"] = repository.references[reference]
            reference = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.endpoint}/{repo_id}/discussions/{number}"
        sha = repository.commit(reference, files)
        return {**answer, "commitOid": sha, "commitUrl": f"{self.endpoint}/{repo_id}/commit/{sha}"}

    def tag(self, repository: Repository, revision: str, name: str) -> dict:
        repository.references[name] = repository.resolve(revision)
        return {}

    def references(self, repository: Repository) -> dict:
        names = [name for name in repository.references if name != "main" and not name.startswith("refs/")]
        tags = [{"name": name, "ref": f"refs/tags/{name}", "targetCommit": repository.resolve(name)} for name in names]
        return {"branches": [], "tags": tags, "converts": []}

    def resolve(self, repository: Repository, revision: str, path: str) -> tuple[dict, bytes]:
        """Return the headers and the content of a file."""
        sha = repository.resolve(revision)
        content = repository.commits[sha].get(path)
        if content is None:
            raise HubError(404, f"{path} does not exist on {revision!r}", "EntryNotFound", commit=sha)
        return {"X-Repo-Commit": sha, "ETag": f'"{oid(content)}"'}, content


class _Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the client was killed
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Take requests apart and hand them to `hub`."""

    hub: LoopbackHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # with it, each answer's content waits 40 ms for the client to confirm the headers

    def log_message(self, *arguments) -> None:
        pass

    def handle_request(self) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            method, path, status = self.hub.fault or ("", "", 0)
            if method == self.command and path in url.path:
                raise HubError(status, f"Status {status}, for a test")
            with self.hub.lock:
                self.hub.calls.append((self.command, url.path))
                answer = self.route(parts, parse_qs(url.query), body)
            if isinstance(answer, tuple):
                headers, content = answer
            else:
                headers, content = {"Content-Type": "application/json"}, json.dumps(answer).encode()
            status = 200
        except HubError as error:
            status, headers, content = error.status, error.headers, json.dumps(error.answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = handle_request

    def route(self, parts: list[str], query: dict, body: bytes) -> dict | list | tuple[dict, bytes]:
        """Return what becomes JSON, or the headers and the content of a file."""
        hub = self.hub
        authorized = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if self.command == "POST" and not authorized:
            raise HubError(401, "Invalid username or password.")
        if parts == ["api", "repos", "create"]:
            return hub.create(json.loads(body))
        if parts == ["api", "validate-yaml"]:
            return {"errors": [], "warnings": []}

        if parts[0] == "api":
            parts = parts[2:] if parts[1] == "models" else parts[1:]
        length = 3 if parts[0] == "datasets" else 2
        repo_id, call, rest = "/".join(parts[:length]), parts[length : length + 1], parts[length + 1 :]
        repository = hub.repositories.get(repo_id)
        if repository is None or (repository.private and not authorized):
            raise HubError(404 if authorized else 401, "Repository not found", "RepoNotFound")
        match call:
            case []:
                return hub.info(repo_id, repository, "main")
            case ["revision"]:
                return hub.info(repo_id, repository, "/".join(rest))
            case ["refs"]:
                return hub.references(repository)
            case ["tree"]:
                recursive = query.get("recursive", ["false"])[0].lower() == "true"
                return hub.tree(repository, rest[0], "/".join(rest[1:]), recursive)
            case ["preupload"]:
                return hub.preupload(repository, rest[0], json.loads(body))
            case ["commit"]:
                lines = [json.loads(line) for line in body.splitlines()]
                return hub.commit(repo_id, repository, rest[0], lines, "create_pr" in query)
            case ["tag"]:
                return hub.tag(repository, rest[0], json.loads(body)["tag"])
            case ["resolve"]:
                return hub.resolve(repository, rest[0], "/".join(rest[1:]))
        raise HubError(404, f"The stand-in does not know {self.command} {self.path}")
