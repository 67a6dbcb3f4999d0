"""A local server with the part of the Hugging Face Hub's HTTP API that huggingface_hub's client and ours use.

Repositories are in memory: a commit is a mapping from paths to contents, and a branch the last commit. Large files are
uploaded by the LFS protocol (Git LFS batch API, with the Hub's multi-part extension), as the client does with
``HF_HUB_DISABLE_XET=1``. Faults are functions that see each request first.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.utils._http import close_session

from tests.support.servers.serving import serve

TOKEN = "hf_theTokenThatNoLogAndNoFileHas"
USER = "org"
ORGANIZATION = "my-org"
"""An organization that the user can write to, as the guides name it."""
PART_BYTES = 16 << 10
"""Files of more bytes are uploaded in parts of this size."""
_LFS_SUFFIXES = (".safetensors", ".bin", ".png")
_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass(frozen=True)
class Request:
    """A request, without its body. *path* is decoded and has no query."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Reply:
    """A reply. With *cut*, the connection is closed after this many bytes of the body."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None


class Reset(Exception):
    """Raised by a fault: the connection is closed without a reply."""


class Refused(Exception):
    """What a request asks for cannot be read by this user: *reply* is the Hub's."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


Fault = Callable[[Request], Reply | None]


def error(status: int, code: str = "", message: str = "", **headers: str) -> Reply:
    """Return a reply as the Hub sends it for an error: its code and message are headers."""
    found = {"X-Error-Code": code, "X-Error-Message": message}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, b"", {key: text for key, text in found.items() if text} | named)


@dataclass
class Repository:
    """A repository: *commits* by their ids, oldest first, and the ids that branches and tags name."""

    private: bool = False
    gated: Literal[False, "manual"] = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    parents: dict[str, str | None] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        text = f"{len(self.commits)} {branch} {sorted(files)}"
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = files
        self.parents[name] = self.branches.get(branch)
        self.branches[branch] = name
        self.messages.append(message)
        return name

    def history(self, commit: str | None) -> Iterator[str]:
        """Yield *commit* and those before it, the newest first."""
        while commit is not None:
            yield commit
            commit = self.parents[commit]

    def resolve(self, revision: str) -> str | None:
        named = self.branches.get(revision) or self.tags.get(revision)
        return named or (revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        commit = self.resolve(revision)
        assert commit is not None, f"no revision {revision}"
        return self.commits[commit]


class HubServer:
    """The server. *fault* sees each request first, and *after* each one that was carried out, before the reply is sent;
    *requests* lists them as ``METHOD path``."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.after: Callable[[Request], None] | None = None
        self.requests: list[str] = []
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.objects: dict[str, bytes] = {}
        """LFS objects that are complete, by SHA-256."""
        self.parts: dict[str, dict[int, bytes]] = {}
        self.buckets: dict[str, dict[str, int]] = {}
        """The sizes of the objects in each bucket. They can only be listed."""
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=serve, args=(self._server,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(
        self, name: str, files: Mapping[str, bytes], kind: str = "model", **options: Any
    ) -> Repository:
        """Add a repository with one commit of *files* on its main branch."""
        repository = Repository(**options)
        repository.commit("main", dict(files), "initial commit")
        self.repositories[kind, name] = repository
        return repository

    def repository(self, name: str, kind: str = "model") -> Repository:
        return self.repositories[kind, name]

    def reset(self) -> None:
        """Forget all repositories, objects, requests and faults."""
        self.fault = self.after = None
        for each in (
            self.requests,
            self.repositories,
            self.objects,
            self.parts,
            self.buckets,
        ):
            each.clear()

    def environment(self, home: str, *, token: str | None = TOKEN) -> dict[str, str]:
        """The environment of a process that uses this server, with its cache and token in *home*."""
        variables = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": home,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return variables | ({"HF_TOKEN": token} if token else {})

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    # ---------------------------------------------------------------- requests

    def reply(self, request: Request, query: Mapping[str, list[str]], body: bytes) -> Reply:
        for method, pattern, name in _ROUTES:
            found = re.fullmatch(pattern, request.path)
            if found and request.method in method:
                handle: Callable[..., Reply] = getattr(self, f"_{name}")
                with self.lock:
                    try:
                        return handle(request, body, query, **found.groupdict())
                    except Refused as refused:
                        return refused.reply
        return error(404, "EntryNotFound", f"no route for {request.method} {request.path}")

    def _user(self, request: Request) -> str | None:
        return USER if request.headers.get("authorization") == f"Bearer {TOKEN}" else None

    def _open(self, request: Request, repo: str, kind: str | None) -> Repository:
        """The repository. Raises :class:`Refused` for a user who may not read it."""
        has_token = request.headers.get("authorization") is not None
        if has_token and self._user(request) is None:
            raise Refused(error(401, message="Invalid credentials in Authorization header"))
        repository = self.repositories.get(((kind or "model").rstrip("s"), repo))
        if repository is None or (repository.private and self._user(request) is None):
            status = 404 if has_token else 401
            code = "RepoNotFound" if has_token else ""
            raise Refused(error(status, code, "Repository not found"))
        return repository

    def _whoami(self, request: Request, body: bytes, query: Any) -> Reply:
        if self._user(request) is None:
            return error(401, message="Invalid username or password.")
        return _json({"name": USER, "type": "user", "orgs": [], "auth": {"type": "access_token"}})

    def _create(self, request: Request, body: bytes, query: Any) -> Reply:
        if self._user(request) is None:
            return error(401, message="Invalid username or password.")
        given = json.loads(body)
        name = f"{given.get('organization') or USER}/{given['name']}"
        if name.split("/")[0] not in (USER, ORGANIZATION):
            return error(
                403, message="You don't have the rights to create a model under this namespace"
            )
        key = (given.get("type", "model"), name)
        url = {"url": f"{self.endpoint}/{name}", "name": name}
        if key in self.repositories:
            return _json({**url, "error": "You already created this model repo"}, 409)
        is_private = given.get("private") or given.get("visibility") == "private"
        self.add(
            name,
            {".gitattributes": b"*.safetensors filter=lfs\n"},
            key[0],
            private=bool(is_private),
        )
        return _json(url)

    def _validate_yaml(self, request: Request, body: bytes, query: Any) -> Reply:
        return _json({"errors": [], "warnings": []})

    def _info(
        self,
        request: Request,
        body: bytes,
        query: Any,
        repo: str,
        kind: str,
        revision: str = "main",
    ) -> Reply:
        repository, commit = self._revision(request, repo, kind, revision)
        siblings = [{"rfilename": path} for path in sorted(repository.commits[commit])]
        document = {
            "_id": "0",
            "id": repo,
            "sha": commit,
            "private": repository.private,
            "siblings": siblings,
        }
        return _json(
            {**document, "gated": repository.gated, "tags": [], "downloads": 0, "likes": 0}
        )

    def _revision(
        self, request: Request, repo: str, kind: str | None, revision: str
    ) -> tuple[Repository, str]:
        """The repository and the commit of a revision. Raises :class:`Refused`."""
        repository = self._open(request, repo, kind)
        commit = repository.resolve(unquote(revision))
        if commit is None:
            raise Refused(error(404, "RevisionNotFound", f"Invalid rev id: {revision}"))
        return repository, commit

    def _tree(
        self, request: Request, body: bytes, query: Any, repo: str, kind: str, revision: str
    ) -> Reply:
        repository, commit = self._revision(request, repo, kind, revision)
        entries = [
            self._entry(path, data) for path, data in sorted(repository.commits[commit].items())
        ]
        return _json(entries)

    def _paths_info(
        self, request: Request, body: bytes, query: Any, repo: str, kind: str, revision: str
    ) -> Reply:
        repository, commit = self._revision(request, repo, kind, revision)
        files = repository.commits[commit]
        wanted = (
            parse_qs(body.decode()).get("paths", [])
            if body[:1] != b"{"
            else json.loads(body)["paths"]
        )
        return _json([self._entry(path, files[path]) for path in wanted if path in files])

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "type": "file",
            "path": path,
            "size": len(data),
            "oid": _git_hash(data),
        }
        if _is_lfs(path):
            entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 130}
        return entry

    def _refs(self, request: Request, body: bytes, query: Any, repo: str, kind: str) -> Reply:
        repository = self._open(request, repo, kind)
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in repository.branches.items()
        ]
        return _json({"branches": branches, "tags": [], "converts": []})

    def _commits(
        self, request: Request, body: bytes, query: Any, repo: str, kind: str, revision: str
    ) -> Reply:
        repository, commit = self._revision(request, repo, kind, revision)
        entries: list[dict[str, Any]] = []
        for name in repository.history(commit):
            date = "2026-01-01T00:00:00.000Z"
            entries.append({"id": name, "title": "", "message": "", "authors": [], "date": date})
        return _json(entries)

    def _branch(
        self, request: Request, body: bytes, query: Any, repo: str, kind: str, branch: str
    ) -> Reply:
        repository = self._open(request, repo, kind)
        name = unquote(branch)
        if name in repository.branches:
            return error(409, message=f"Reference already exists: {name}")
        start = json.loads(body or b"{}").get("startingPoint", "main")
        repository.branches[name] = repository.branches.get(start, start)
        return _json({})

    def _tag(
        self, request: Request, body: bytes, query: Any, repo: str, kind: str, revision: str
    ) -> Reply:
        repository, commit = self._revision(request, repo, kind, revision)
        repository.tags[json.loads(body)["tag"]] = commit
        return _json({})

    def _auth_check(self, request: Request, body: bytes, query: Any, repo: str, kind: str) -> Reply:
        self._open(request, repo, kind)
        return _json({})

    def _preupload(
        self, request: Request, body: bytes, query: Any, repo: str, kind: str, revision: str
    ) -> Reply:
        repository, commit = self._revision(request, repo, kind, revision)
        files = repository.commits[commit]
        replies = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            mode = "lfs" if _is_lfs(path) else "regular"
            entry = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            if path in files:
                data = files[path]
                entry["oid"] = _sha256(data) if _is_lfs(path) else _git_hash(data)
            replies.append(entry)
        return _json({"files": replies})

    def _commit(
        self, request: Request, body: bytes, query: Any, repo: str, kind: str, revision: str
    ) -> Reply:
        if self._user(request) is None:
            return error(403, message="You don't have write access")
        repository, parent = self._revision(request, repo, kind, revision)
        files, message = dict(repository.commits[parent]), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
                if value.get("parentCommit") not in (None, parent):
                    return error(
                        412, message="A commit has happened since. Please refresh and try again."
                    )
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.objects:
                    return error(400, message=f"LFS object {value['oid']} was not uploaded")
                files[value["path"]] = self.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                files.pop(value["path"])
        name = repository.commit(unquote(revision), files, message)
        return _json({"commitUrl": f"{self.endpoint}/{repo}/commit/{name}", "commitOid": name})

    # ---------------------------------------------------------------- large files

    def _lfs_batch(
        self, request: Request, body: bytes, query: Any, repo: str, kind: str | None = None
    ) -> Reply:
        if self._user(request) is None:
            return error(401, message="Invalid username or password.")
        objects = []
        for each in json.loads(body)["objects"]:
            oid, size = each["oid"], each["size"]
            entry: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.objects:
                entry["actions"] = {"upload": self._upload_action(oid, size)}
                entry["actions"]["verify"] = {"href": f"{self.endpoint}/lfs/verify/{oid}"}
            objects.append(entry)
        return _json({"transfer": "multipart", "objects": objects})

    def _upload_action(self, oid: str, size: int) -> dict[str, Any]:
        if size <= PART_BYTES:
            return {"href": f"{self.endpoint}/lfs/{oid}"}
        header = {"chunk_size": str(PART_BYTES)}
        for number in range(-(-size // PART_BYTES)):
            header[f"{number + 1:05}"] = f"{self.endpoint}/lfs/{oid}/{number + 1}"
        return {"href": f"{self.endpoint}/lfs/complete/{oid}", "header": header}

    def _lfs_put(
        self, request: Request, body: bytes, query: Any, oid: str, number: str | None = None
    ) -> Reply:
        if number is None:
            return self._store(oid, body)
        self.parts.setdefault(oid, {})[int(number)] = body
        return Reply(200, b"", {"ETag": f'"{number}"'})

    def _lfs_complete(self, request: Request, body: bytes, query: Any, oid: str) -> Reply:
        parts = self.parts.pop(oid)
        return self._store(oid, b"".join(parts[number] for number in sorted(parts)))

    def _store(self, oid: str, data: bytes) -> Reply:
        if _sha256(data) != oid:
            return error(400, message="the content does not have this SHA-256")
        self.objects[oid] = data
        return _json({})

    def _lfs_verify(self, request: Request, body: bytes, query: Any, oid: str) -> Reply:
        return _json({}) if oid in self.objects else error(404)

    # ---------------------------------------------------------------- buckets

    def _bucket(self, request: Request, body: bytes, query: Any, repo: str) -> Reply:
        size = sum(self.buckets[repo].values())
        facts = {"id": repo, "private": True, "createdAt": "2026-01-01T00:00:00.000Z"}
        return _json({**facts, "size": size, "totalFiles": len(self.buckets[repo])})

    def _bucket_tree(
        self, request: Request, body: bytes, query: Any, repo: str, prefix: str
    ) -> Reply:
        entries = []
        for path, size in self.buckets[repo].items():
            if path.startswith(f"{unquote(prefix)}/"):
                entries.append({"type": "file", "path": path, "size": size, "xetHash": "0" * 64})
        return _json(entries)

    # ---------------------------------------------------------------- downloads

    def _resolve(
        self,
        request: Request,
        body: bytes,
        query: Any,
        repo: str,
        revision: str,
        path: str,
        kind: str | None = None,
    ) -> Reply:
        repository, commit = self._revision(request, repo, kind, revision)
        if repository.gated:
            status = 403 if self._user(request) else 401
            return error(
                status,
                "GatedRepo",
                f"Access to model {repo} is restricted. Visit it to ask for access.",
            )
        data = repository.commits[commit].get(unquote(path))
        headers = {"X-Repo-Commit": commit}
        if data is None:
            missing = error(404, "EntryNotFound", "Entry not found")
            return Reply(404, b"", {**missing.headers, **headers})
        etag = _sha256(data) if _is_lfs(path) else _git_hash(data)
        headers |= {"ETag": f'"{etag}"', "Accept-Ranges": "bytes", "X-Linked-Size": str(len(data))}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if wanted is None:
            return Reply(200, data, headers)
        start = int(wanted[1])
        end = int(wanted[2]) + 1 if wanted[2] else len(data)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        return Reply(206, data[start:end], headers)


_KIND = r"(?P<kind>models|datasets)"
_ROUTES = (
    (("GET",), r"/api/whoami-v2", "whoami"),
    (("POST",), r"/api/repos/create", "create"),
    (("GET",), rf"/api/buckets/{_REPO}", "bucket"),
    (("GET",), rf"/api/buckets/{_REPO}/tree/(?P<prefix>.+)", "bucket_tree"),
    (("POST",), r"/api/validate-yaml", "validate_yaml"),
    (("GET",), rf"/api/{_KIND}/{_REPO}", "info"),
    (("GET",), rf"/api/{_KIND}/{_REPO}/revision/(?P<revision>[^/]+)", "info"),
    (("GET",), rf"/api/{_KIND}/{_REPO}/tree/(?P<revision>[^/]+)/?", "tree"),
    (("POST",), rf"/api/{_KIND}/{_REPO}/paths-info/(?P<revision>[^/]+)", "paths_info"),
    (("GET",), rf"/api/{_KIND}/{_REPO}/refs", "refs"),
    (("GET",), rf"/api/{_KIND}/{_REPO}/commits/(?P<revision>[^/]+)", "commits"),
    (("POST",), rf"/api/{_KIND}/{_REPO}/branch/(?P<branch>.+)", "branch"),
    (("POST",), rf"/api/{_KIND}/{_REPO}/tag/(?P<revision>[^/]+)", "tag"),
    (("GET",), rf"/api/{_KIND}/{_REPO}/auth-check", "auth_check"),
    (("POST",), rf"/api/{_KIND}/{_REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    (("POST",), rf"/api/{_KIND}/{_REPO}/commit/(?P<revision>[^/]+)", "commit"),
    (("POST",), rf"/{_REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    (("PUT",), r"/lfs/(?P<oid>[0-9a-f]{64})(?:/(?P<number>\d+))?", "lfs_put"),
    (("POST",), r"/lfs/complete/(?P<oid>[0-9a-f]{64})", "lfs_complete"),
    (("POST",), r"/lfs/verify/(?P<oid>[0-9a-f]{64})", "lfs_verify"),
    (
        ("GET", "HEAD"),
        rf"/(?:(?P<kind>datasets)/)?{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
        "resolve",
    ),
)


def _json(value: object, status: int = 200) -> Reply:
    return Reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _is_lfs(path: str) -> bool:
    return path.endswith(_LFS_SUFFIXES)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def _handle(self) -> None:
        url = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        # A quoted branch stays quoted: its slash is no separator.
        request = Request(self.command, url.path, headers)
        self.hub.requests.append(f"{request.method} {request.path}")
        body = self._body(headers)
        try:
            reply = self.hub.fault(request) if self.hub.fault is not None else None
            if reply is None:
                reply = self.hub.reply(request, parse_qs(url.query), body)
            if self.hub.after is not None:
                self.hub.after(request)
        except Reset:
            self.close_connection = True
            return
        self._send(reply)

    def _body(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(headers.get("content-length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body[: reply.cut])
        if reply.cut is not None:
            self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


# The names that http.server calls.
for _method in ("GET", "HEAD", "POST", "PUT"):
    setattr(_Handler, f"do_{_method}", _Handler._handle)


def _handler(server: HubServer) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"hub": server})


@contextlib.contextmanager
def hub_server() -> Iterator[HubServer]:
    """Run a server without repositories."""
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def using(
    server: HubServer, home: str, monkeypatch: pytest.MonkeyPatch, *, token: str | None = TOKEN
) -> Iterator[None]:
    """Let huggingface_hub in this process use *server*, with its cache in *home*: it read the environment before.

    The changes end with *monkeypatch*, which tests also change these values with. Restored by another one, a value of
    this server could remain for the tests that follow.
    """
    settings = {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": f"{home}/hub",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_TOKEN_PATH": f"{home}/token",
    }
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    try:
        yield
    finally:
        close_session()
