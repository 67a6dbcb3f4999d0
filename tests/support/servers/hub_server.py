"""A local server with the part of the Hugging Face Hub's HTTP API that huggingface_hub's client and ours use.

Repositories are in memory: a commit is a mapping from paths to contents, and a branch the last commit. Large files are
uploaded by the LFS protocol (Git LFS batch API, with the Hub's multi-part extension), as the client does with
``HF_HUB_DISABLE_XET=1``. Faults are functions that see each request first.
"""

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
_KIND = r"(?P<kind>models|datasets)"
_REVISION = r"(?P<revision>[^/]+)"


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
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=serve, args=(self._server,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(
        self, name: str, files: Mapping[str, bytes], kind: str = "model", **options: Any
    ) -> Repository:
        repository = Repository(**options)
        repository.commit("main", dict(files), "initial commit")
        self.repositories[kind, name] = repository
        return repository

    def repository(self, name: str, kind: str = "model") -> Repository:
        return self.repositories[kind, name]

    def reset(self) -> None:
        self.fault = self.after = None
        for each in (self.requests, self.repositories, self.objects, self.parts):
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

    def reply(self, request: Request, body: bytes) -> Reply:
        for methods, pattern, handle in _ROUTES:
            found = re.fullmatch(pattern, request.path)
            if found and request.method in methods:
                named = {name: text for name, text in found.groupdict().items() if text is not None}
                with self.lock:
                    try:
                        return handle(self, Call(request, body, **named))
                    except Refused as refused:
                        return refused.reply
        return error(404, "EntryNotFound", f"no route for {request.method} {request.path}")


@dataclass(frozen=True)
class Call:
    request: Request
    body: bytes
    repo: str = ""
    kind: str = "models"
    revision: str = "main"
    path: str = ""
    oid: str = ""
    number: str | None = None

    @property
    def has_token(self) -> bool:
        return self.request.headers.get("authorization") is not None

    @property
    def is_user(self) -> bool:
        return self.request.headers.get("authorization") == f"Bearer {TOKEN}"

    def check_user(self) -> None:
        if not self.is_user:
            raise Refused(error(401, message="Invalid username or password."))

    def document(self) -> Any:
        return json.loads(self.body)

    def repository(self, hub: HubServer) -> Repository:
        """The repository. Raises :class:`Refused` for a user who may not read it."""
        if self.has_token and not self.is_user:
            raise Refused(error(401, message="Invalid credentials in Authorization header"))
        repository = hub.repositories.get((self.kind.rstrip("s"), self.repo))
        if repository is None or (repository.private and not self.is_user):
            status = 404 if self.has_token else 401
            code = "RepoNotFound" if self.has_token else ""
            raise Refused(error(status, code, "Repository not found"))
        return repository

    def commit(self, hub: HubServer) -> tuple[Repository, str]:
        """The repository and the commit of the revision. Raises :class:`Refused`."""
        repository = self.repository(hub)
        commit = repository.resolve(unquote(self.revision))
        if commit is None:
            raise Refused(error(404, "RevisionNotFound", f"Invalid rev id: {self.revision}"))
        return repository, commit

    def files(self, hub: HubServer) -> dict[str, bytes]:
        repository, commit = self.commit(hub)
        return repository.commits[commit]


Handle = Callable[[HubServer, Call], Reply]
_ROUTES: list[tuple[tuple[str, ...], str, Handle]] = []


def _route(methods: str, *patterns: str) -> Callable[[Handle], Handle]:
    """Let the function answer requests with one of *methods* and a path of one of *patterns*."""

    def add(handle: Handle) -> Handle:
        _ROUTES.extend((tuple(methods.split()), pattern, handle) for pattern in patterns)
        return handle

    return add


@_route("GET", r"/api/whoami-v2")
def _whoami(hub: HubServer, call: Call) -> Reply:
    call.check_user()
    return _json({"name": USER, "type": "user", "orgs": [], "auth": {"type": "access_token"}})


@_route("POST", r"/api/repos/create")
def _create(hub: HubServer, call: Call) -> Reply:
    call.check_user()
    given = call.document()
    name = f"{given.get('organization') or USER}/{given['name']}"
    if name.split("/")[0] not in (USER, ORGANIZATION):
        message = "You don't have the rights to create a model under this namespace"
        return error(403, message=message)
    kind = given.get("type", "model")
    url = {"url": f"{hub.endpoint}/{name}", "name": name}
    if (kind, name) in hub.repositories:
        return _json({**url, "error": "You already created this model repo"}, 409)
    is_private = given.get("private") or given.get("visibility") == "private"
    attributes = {".gitattributes": b"*.safetensors filter=lfs\n"}
    hub.add(name, attributes, kind, private=bool(is_private))
    return _json(url)


@_route("POST", r"/api/validate-yaml")
def _validate_yaml(hub: HubServer, call: Call) -> Reply:
    return _json({"errors": [], "warnings": []})


@_route("GET", rf"/api/{_KIND}/{_REPO}", rf"/api/{_KIND}/{_REPO}/revision/{_REVISION}")
def _info(hub: HubServer, call: Call) -> Reply:
    repository, commit = call.commit(hub)
    siblings = [{"rfilename": path} for path in sorted(repository.commits[commit])]
    document = {"_id": "0", "id": call.repo, "sha": commit, "siblings": siblings}
    document |= {"private": repository.private, "gated": repository.gated}
    return _json({**document, "tags": [], "downloads": 0, "likes": 0})


@_route("GET", rf"/api/{_KIND}/{_REPO}/tree/{_REVISION}/?")
def _tree(hub: HubServer, call: Call) -> Reply:
    return _json([_entry(path, data) for path, data in sorted(call.files(hub).items())])


@_route("POST", rf"/api/{_KIND}/{_REPO}/paths-info/{_REVISION}")
def _paths_info(hub: HubServer, call: Call) -> Reply:
    files = call.files(hub)
    is_form = call.body[:1] != b"{"
    found = parse_qs(call.body.decode()) if is_form else call.document()
    wanted = found.get("paths", [])
    return _json([_entry(path, files[path]) for path in wanted if path in files])


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data)}
    entry["oid"] = _git_hash(data)
    if _is_lfs(path):
        entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 130}
    return entry


@_route("GET", rf"/api/{_KIND}/{_REPO}/refs")
def _refs(hub: HubServer, call: Call) -> Reply:
    branches = []
    for name, commit in call.repository(hub).branches.items():
        branches.append({"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit})
    return _json({"branches": branches, "tags": [], "converts": []})


@_route("GET", rf"/api/{_KIND}/{_REPO}/commits/{_REVISION}")
def _commits(hub: HubServer, call: Call) -> Reply:
    repository, commit = call.commit(hub)
    entries: list[dict[str, Any]] = []
    for name in repository.history(commit):
        date = "2026-01-01T00:00:00.000Z"
        entries.append({"id": name, "title": "", "message": "", "authors": [], "date": date})
    return _json(entries)


@_route("POST", rf"/api/{_KIND}/{_REPO}/branch/(?P<path>.+)")
def _branch(hub: HubServer, call: Call) -> Reply:
    repository, name = call.repository(hub), unquote(call.path)
    if name in repository.branches:
        return error(409, message=f"Reference already exists: {name}")
    start = json.loads(call.body or b"{}").get("startingPoint", "main")
    repository.branches[name] = repository.branches.get(start, start)
    return _json({})


@_route("POST", rf"/api/{_KIND}/{_REPO}/tag/{_REVISION}")
def _tag(hub: HubServer, call: Call) -> Reply:
    repository, commit = call.commit(hub)
    repository.tags[call.document()["tag"]] = commit
    return _json({})


@_route("GET", rf"/api/{_KIND}/{_REPO}/auth-check")
def _auth_check(hub: HubServer, call: Call) -> Reply:
    call.repository(hub)
    return _json({})


@_route("POST", rf"/api/{_KIND}/{_REPO}/preupload/{_REVISION}")
def _preupload(hub: HubServer, call: Call) -> Reply:
    files = call.files(hub)
    replies = []
    for file in call.document()["files"]:
        path = file["path"]
        mode = "lfs" if _is_lfs(path) else "regular"
        entry = {"path": path, "uploadMode": mode, "shouldIgnore": False}
        if path in files:
            data = files[path]
            entry["oid"] = _sha256(data) if _is_lfs(path) else _git_hash(data)
        replies.append(entry)
    return _json({"files": replies})


@_route("POST", rf"/api/{_KIND}/{_REPO}/commit/{_REVISION}")
def _commit(hub: HubServer, call: Call) -> Reply:
    if not call.is_user:
        return error(403, message="You don't have write access")
    repository, parent = call.commit(hub)
    files, message = dict(repository.commits[parent]), ""
    for line in call.body.splitlines():
        item = json.loads(line)
        value = item["value"]
        if item["key"] == "header":
            message = value["summary"]
            if value.get("parentCommit") not in (None, parent):
                reason = "A commit has happened since. Please refresh and try again."
                return error(412, message=reason)
        elif item["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif item["key"] == "lfsFile":
            if value["oid"] not in hub.objects:
                return error(400, message=f"LFS object {value['oid']} was not uploaded")
            files[value["path"]] = hub.objects[value["oid"]]
        elif item["key"] == "deletedFile":
            files.pop(value["path"])
    name = repository.commit(unquote(call.revision), files, message)
    return _json({"commitUrl": f"{hub.endpoint}/{call.repo}/commit/{name}", "commitOid": name})


# ---------------------------------------------------------------- large files


@_route("POST", rf"/{_REPO}\.git/info/lfs/objects/batch")
def _lfs_batch(hub: HubServer, call: Call) -> Reply:
    call.check_user()
    objects = []
    for each in call.document()["objects"]:
        oid, size = each["oid"], each["size"]
        entry: dict[str, Any] = {"oid": oid, "size": size}
        if oid not in hub.objects:
            entry["actions"] = {"upload": _upload_action(hub, oid, size)}
            entry["actions"]["verify"] = {"href": f"{hub.endpoint}/lfs/verify/{oid}"}
        objects.append(entry)
    return _json({"transfer": "multipart", "objects": objects})


def _upload_action(hub: HubServer, oid: str, size: int) -> dict[str, Any]:
    if size <= PART_BYTES:
        return {"href": f"{hub.endpoint}/lfs/{oid}"}
    header = {"chunk_size": str(PART_BYTES)}
    for number in range(-(-size // PART_BYTES)):
        header[f"{number + 1:05}"] = f"{hub.endpoint}/lfs/{oid}/{number + 1}"
    return {"href": f"{hub.endpoint}/lfs/complete/{oid}", "header": header}


@_route("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})(?:/(?P<number>\d+))?")
def _lfs_put(hub: HubServer, call: Call) -> Reply:
    if call.number is None:
        return _store(hub, call.oid, call.body)
    hub.parts.setdefault(call.oid, {})[int(call.number)] = call.body
    return Reply(200, b"", {"ETag": f'"{call.number}"'})


@_route("POST", r"/lfs/complete/(?P<oid>[0-9a-f]{64})")
def _lfs_complete(hub: HubServer, call: Call) -> Reply:
    parts = hub.parts.pop(call.oid)
    return _store(hub, call.oid, b"".join(parts[number] for number in sorted(parts)))


def _store(hub: HubServer, oid: str, data: bytes) -> Reply:
    if _sha256(data) != oid:
        return error(400, message="the content does not have this SHA-256")
    hub.objects[oid] = data
    return _json({})


@_route("POST", r"/lfs/verify/(?P<oid>[0-9a-f]{64})")
def _lfs_verify(hub: HubServer, call: Call) -> Reply:
    return _json({}) if call.oid in hub.objects else error(404)


# ---------------------------------------------------------------- downloads


@_route("GET HEAD", rf"/(?:(?P<kind>datasets)/)?{_REPO}/resolve/{_REVISION}/(?P<path>.+)")
def _resolve(hub: HubServer, call: Call) -> Reply:
    repository, commit = call.commit(hub)
    if repository.gated:
        message = f"Access to model {call.repo} is restricted. Visit it to ask for access."
        return error(403 if call.is_user else 401, "GatedRepo", message)
    data = repository.commits[commit].get(unquote(call.path))
    headers = {"X-Repo-Commit": commit}
    if data is None:
        missing = error(404, "EntryNotFound", "Entry not found")
        return Reply(404, b"", {**missing.headers, **headers})
    etag = _sha256(data) if _is_lfs(call.path) else _git_hash(data)
    headers |= {"ETag": f'"{etag}"', "Accept-Ranges": "bytes", "X-Linked-Size": str(len(data))}
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", call.request.headers.get("range", ""))
    if wanted is None:
        return Reply(200, data, headers)
    start = int(wanted[1])
    end = int(wanted[2]) + 1 if wanted[2] else len(data)
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
    return Reply(206, data[start:end], headers)


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
                reply = self.hub.reply(request, body)
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
