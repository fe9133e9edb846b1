"""The commands of `plato`. Each is thin: it reads the settings, asks plato.local, prints.

What is slow to import is imported by the command that needs it. Errors are one line on stderr; `main` prints them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

import typer

from plato.cli import groups

if TYPE_CHECKING:
    from plato.local.cluster import LocalCluster
    from plato.runtime.settings import Settings

app = typer.Typer(
    name="plato",
    help="Plato, an instant-messaging platform: the embedded cluster and a chat client.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
db = typer.Typer(help="The database of a cluster.", no_args_is_help=True)
app.add_typer(db, name="db")

group = typer.Typer(help="Groups: conversations of up to 10,000 members.", no_args_is_help=True)
app.add_typer(group, name="group")

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        "-d",
        help="Data folder. Default: /var/lib/plato as root, else ./.plato",
        show_default=False,
        readable=False,  # plato.local says it better: who may
    ),
]
PortOffset = Annotated[
    int | None, typer.Option("--port-offset", help="Added to every port of the embedded cluster.", show_default=False)
]
SettingsFile = Annotated[
    Path | None, typer.Option("--settings", "-s", help="Settings file. Default: ./plato.yaml", show_default=False)
]
Slots = Annotated[str, typer.Argument(help="Slots of one shard, as 0-15 or 0-15,20.")]
Shard = Annotated[str, typer.Argument(help="The shard that gets them (plato-s0, plato-s1, …).")]
Gateway = Annotated[str, typer.Argument(help="The gateway (edge-0, edge-1, …).")]
Target = Annotated[str, typer.Argument(help="A process (plato-s0, edge-1, …) or a kind (state, gateway, msg, …).")]


_FLAGS = {"local.data_dir": "--data-dir", "local.port_offset": "--port-offset"}


def _print_version(wanted: bool) -> None:
    if wanted:
        from plato import __version__

        print(f"plato {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plato, an instant-messaging platform: the embedded cluster and a chat client."""


def _settings(file: Path | None, data_dir: Path | None = None, port_offset: int | None = None) -> Settings:
    from plato.runtime.settings import load

    flags: dict[str, Any] = {}
    if data_dir is not None:
        flags["local.data_dir"] = data_dir
    if port_offset is not None:
        flags["local.port_offset"] = port_offset
    return load(file, flags=flags, flag_names=_FLAGS)


def _cluster(data_dir: Path | None, file: Path | None = None) -> LocalCluster:
    from plato.local.cluster import LocalCluster
    from plato.local.folder import data_dir as chosen

    return LocalCluster(chosen(_settings(file, data_dir)))


def _own_command() -> str:
    """How the user calls this program from where they are."""
    found = shutil.which("plato")
    here = Path(sys.executable).parent / "plato"
    if found is not None and Path(found).resolve() == here.resolve():
        return "plato"
    if not here.exists():
        return f"{sys.executable} -m plato.cli"
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(here)


# ── the embedded cluster ─────────────────────────────────────────────────────────────────────────────────────


@app.command()
def up(data_dir: DataDir = None, port_offset: PortOffset = None, settings: SettingsFile = None) -> int:
    """Start everything on this machine and stay; Ctrl-C stops it, the data stay."""
    from plato.local.folder import data_dir as chosen
    from plato.local.ports import web_origins
    from plato.local.supervisor import Supervisor
    from plato.runtime.settings import load

    loaded = _settings(settings, data_dir, port_offset)
    # In the other terminals there is this folder's plato.yaml, but not this one's variables and flags.
    elsewhere = chosen(load(environ={})) == chosen(loaded)
    where = "" if elsewhere else f" --data-dir {shlex.quote(str(chosen(loaded)))}"

    def how_to_chat() -> str:
        plato = _own_command()
        page = "".join(f"Or in two browsers: {origin}\n\n" for origin in web_origins(loaded)[:1])
        return (
            "\nPlato is up. Chat from two more terminals:\n\n"
            f"    {plato} chat alice --to bob{where}\n"
            f"    {plato} chat bob --to alice{where}\n\n"
            f"{page}"
            f"See it run with `{plato} status{where}`; Ctrl-C here stops it, the data stay."
        )

    def say(line: str) -> None:
        print(line, flush=True)

    return asyncio.run(Supervisor(loaded, say, how_to_chat).run())


@app.command()
def down(data_dir: DataDir = None, settings: SettingsFile = None) -> int:
    """Stop the cluster of this folder; the data stay."""
    cluster = _cluster(data_dir, settings)
    if not cluster.running:
        print(f"Plato is not running in {cluster.data_dir}")
        return 0
    cluster.down()
    print("stopped; the data stay")
    return 0


@app.command()
def status(
    data_dir: DataDir = None,
    settings: SettingsFile = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Show every process. Exit code 0: all serve; 1: something does not, or the bus does not answer it."""
    import json

    from plato.cli.show import status_lines

    cluster = _cluster(data_dir, settings)
    found = cluster.status()
    print(json.dumps(found, indent=1) if json_ else "\n".join(status_lines(found, _override(cluster, found))))
    well = all(entry["ready"] and not entry.get("bus") for entry in found["processes"])
    return 0 if well and found["phase"] == "up" else 1


def _override(cluster: LocalCluster, found: dict[str, Any]) -> str:
    """What is decided over the figures' heads, in words; "": nothing, or ipconfig does not say."""
    from plato.cli import dispatch
    from plato.local.folder import LocalError

    if not any(entry["kind"] == "ipconfig" and entry["ready"] for entry in found["processes"]):
        return ""
    try:
        order = cluster.ask_ipconfig("GET", "/override", timeout_s=2.0)["override"]
    except LocalError:
        return ""
    return "" if order is None else dispatch.overridden(order)


@app.command()
def stop(target: Target, data_dir: DataDir = None, settings: SettingsFile = None) -> int:
    """Stop processes of the running cluster, and keep them stopped until `plato start`."""
    print("stopped: " + ", ".join(_cluster(data_dir, settings).stop_processes(target)))
    return 0


@app.command()
def start(target: Target, data_dir: DataDir = None, settings: SettingsFile = None) -> int:
    """Start processes again that `plato stop` stopped."""
    print("serving: " + ", ".join(_cluster(data_dir, settings).start_processes(target)))
    return 0


@app.command()
def move(slots: Slots, shard: Shard, data_dir: DataDir = None, settings: SettingsFile = None) -> int:
    """Move slots of connection state to another shard, under live clients."""
    moved = _cluster(data_dir, settings).move(slots, shard)
    print(f"{len(moved)} slots move to {shard}" if moved else f"{shard} has them already")
    return 0


@app.command()
def drain(
    gateway: Gateway,
    back: Annotated[bool, typer.Option("--back", help="Take the drain back: it serves again.")] = False,
    pace: Annotated[int | None, typer.Option(help="Clients per second.", min=1, max=10_000)] = None,
    settle: Annotated[int | None, typer.Option(help="Seconds before the first one.", min=0)] = None,
    deadline: Annotated[int | None, typer.Option(help="Seconds until the rest is closed.", min=0)] = None,
    data_dir: DataDir = None,
    settings: SettingsFile = None,
) -> int:
    """Move the clients of a gateway to the others, without a gap; it takes nobody in until `plato drain NAME --back`."""
    cluster = _cluster(data_dir, settings)
    if back:
        cluster.undrain(gateway)
        print(f"{gateway} serves again")
    else:
        cluster.drain(gateway, pace_per_s=pace, settle_s=settle, deadline_s=deadline)
        print(f"{gateway} drains")
    return 0


# ── which gateway clients get ────────────────────────────────────────────────────────────────────────────────


@app.command()
def explain(
    address: Annotated[str, typer.Option("--address", help="The client's IP address.")] = "",
    zone: Annotated[str, typer.Option("--zone", help="The client's zone.")] = "",
    region: Annotated[str, typer.Option("--region", help="The client's region.")] = "",
    json_: Annotated[bool, typer.Option("--json", help="As JSON, with all scores.")] = False,
    data_dir: DataDir = None,
    settings: SettingsFile = None,
) -> int:
    """Show which gateways a client would be sent to, and why in this order."""
    import json

    from plato.cli import dispatch

    found = _cluster(data_dir, settings).ask_ipconfig("GET", dispatch.explain_path(address, zone, region))
    print(json.dumps(found, indent=1) if json_ else "\n".join(dispatch.explained(found)))
    return 0


@app.command()
def override(
    first: Annotated[list[str] | None, typer.Option("--first", help="A gateway that stands first.")] = None,
    never: Annotated[list[str] | None, typer.Option("--never", help="A gateway that is not listed.")] = None,
    by: Annotated[str, typer.Option("--by", help="load, distance or chance: what orders the list.")] = "load",
    for_s: Annotated[int, typer.Option("--for-s", min=0, help="Seconds until it ends by itself; 0: never.")] = 0,
    reason: Annotated[str, typer.Option("--reason", help="For whoever finds it.")] = "",
    clear: Annotated[bool, typer.Option("--clear", help="Take it back.")] = False,
    data_dir: DataDir = None,
    settings: SettingsFile = None,
) -> int:
    """Decide over the figures' heads which gateways clients are sent to; with no option: show what is decided."""
    from plato.cli import dispatch

    cluster = _cluster(data_dir, settings)
    if clear:
        found = cluster.ask_ipconfig("DELETE", "/override")
    elif first or never or by != "load":
        body = dispatch.override_body(by, first or (), never or (), for_s, reason)
        found = cluster.ask_ipconfig("PUT", "/override", body)
    else:
        found = cluster.ask_ipconfig("GET", "/override")
    print(f"override: {dispatch.overridden(found['override'])}")
    if found.get("note"):
        print(found["note"])
    return 0


@app.command()
def rebalance(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would move.")] = False,
    pace: Annotated[int | None, typer.Option(help="Clients per second and gateway.", min=1, max=10_000)] = None,
    least: Annotated[int, typer.Option(help="Leave a smaller surplus where it is.", min=1)] = 10,
    data_dir: DataDir = None,
    settings: SettingsFile = None,
) -> int:
    """Move the surplus of fuller gateways to emptier ones, under live clients."""
    from plato.cli import dispatch

    body = dispatch.rebalance_body(dry_run, pace, least)
    cluster = _cluster(data_dir, settings)
    found = cluster.ask_ipconfig("POST", "/rebalance", body)
    known = [entry["name"] for entry in cluster.status()["processes"] if entry["kind"] == "gateway"]
    print("\n".join(dispatch.rebalanced(found, dry_run, known)))
    return 1 if found["refused"] else 0


@app.command()
def doctor(data_dir: DataDir = None, port_offset: PortOffset = None, settings: SettingsFile = None) -> int:
    """Look at this machine and the cluster, and say in words what is wrong. Exit code 1: something is."""
    from plato.local.doctor import Level, examine

    marks = {Level.OK: "ok   ", Level.NOTE: "note ", Level.BAD: "BAD  "}
    bad = 0
    for finding in examine(_settings(settings, data_dir, port_offset)):
        print(f"{marks[finding.level]} {finding.text}", flush=True)
        bad += finding.level is Level.BAD
    print("nothing stands in the way" if not bad else f"{bad} to put right")
    return 1 if bad else 0


# ── people ───────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def chat(
    user: Annotated[str, typer.Argument(help="Who you are.")],
    to: Annotated[str | None, typer.Option("--to", help="Who you talk to.", show_default=False)] = None,
    conversation: Annotated[
        str | None, typer.Option("--conversation", "-c", help="Id of a conversation instead.", show_default=False)
    ] = None,
    group: Annotated[
        str | None, typer.Option("--group", "-g", help="A group that you are in: its title or id.", show_default=False)
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Lines in and out instead of a full screen.")] = False,
    transport: Annotated[str, typer.Option("--transport", help="tcp or ws.")] = "tcp",
    device: Annotated[
        str, typer.Option("--device", help="Another installation of USER: a second chat at the same time needs one.")
    ] = "default",
    data_dir: DataDir = None,
    settings: SettingsFile = None,
) -> int:
    """Chat as USER through the embedded cluster, with its development key."""
    from plato.cli.chat import peer_fault, run_chat

    if fault := peer_fault(to, conversation, group):
        raise typer.BadParameter(fault)
    if transport not in ("tcp", "ws"):
        raise typer.BadParameter(f"--transport {transport!r}: tcp or ws")
    cluster = _cluster(data_dir, settings)
    cluster.status()  # not running: says so, instead of a client that waits for ever
    cluster.token(user)  # an impossible user_id: says so now
    way: Literal["tcp", "ws"] = "ws" if transport == "ws" else "tcp"
    store = cluster.data_dir / "clients" / f"{quote(user, safe='')}@{quote(device, safe='')}.db"
    store.parent.mkdir(mode=0o700, exist_ok=True)

    async def token() -> str:
        return cluster.token(user)

    return asyncio.run(
        run_chat(
            user=user,
            to=to,
            conversation=conversation,
            group=group,
            api_url=cluster.api_url,
            token=token,
            store_path=store,
            ipconfig_url=cluster.ipconfig_url,
            gateways=cluster.gateway_addresses(way),
            transport=way,
            plain=plain or not (sys.stdin.isatty() and sys.stdout.isatty()),
        )
    )


@app.command()
def token(
    user: Annotated[str, typer.Argument(help="The user_id that the token speaks for.")],
    ttl: Annotated[int, typer.Option("--ttl", min=1, help="Seconds until it expires.")] = 3_600,
    scope: Annotated[str, typer.Option("--scope", help="server: an application server, which acts for anybody.")] = "",
    data_dir: DataDir = None,
    settings: SettingsFile = None,
) -> int:
    """Print a token for USER, signed by the embedded cluster's development key."""
    if scope not in ("", "server"):
        raise typer.BadParameter(f"--scope {scope!r}: there is one, server; without it the token is a person's")
    print(_cluster(data_dir, settings).token(user, ttl, scope))
    return 0


@group.command(name="create")
def create_group(
    name: groups.Name,
    member: groups.Members = None,
    members_file: groups.MembersFile = None,
    data_dir: DataDir = None,
    settings: SettingsFile = None,
) -> int:
    """Make a group with these members."""
    users = groups.named(member, members_file)
    found = _cluster(data_dir, settings).ask_msg("POST", groups.PATH, groups.body(name, "", members=users))
    print(groups.done(found, f"made, with {len(users):,} members"))
    return 0


@group.command(name="add")
def add_members(
    name: groups.Name,
    member: groups.Members = None,
    members_file: groups.MembersFile = None,
    data_dir: DataDir = None,
    settings: SettingsFile = None,
) -> int:
    """Add members; they read what is written from now on."""
    users = groups.named(member, members_file)
    found = _cluster(data_dir, settings).ask_msg("POST", groups.MEMBERS_PATH, groups.body(name, "", add=users))
    print(groups.done(found, f"{len(users):,} are members"))
    return 0


@group.command(name="remove")
def remove_members(
    name: groups.Name,
    member: groups.Members = None,
    members_file: groups.MembersFile = None,
    data_dir: DataDir = None,
    settings: SettingsFile = None,
) -> int:
    """Remove members; they read nothing of it any more."""
    users = groups.named(member, members_file)
    found = _cluster(data_dir, settings).ask_msg("POST", groups.MEMBERS_PATH, groups.body(name, "", remove=users))
    print(groups.done(found, f"{len(users):,} are no members"))
    return 0


@group.command(name="show")
def show_group(
    name: groups.Name,
    after: Annotated[str, typer.Option("--after", help="Show members after this one, by their ids.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=1_000, help="How many of them.")] = 100,
    data_dir: DataDir = None,
    settings: SettingsFile = None,
) -> int:
    """Show a group: how many members and messages, and a page of the members."""
    found = _cluster(data_dir, settings).ask_msg("GET", groups.show_path(name, after, limit))
    print("\n".join(groups.shown(found)))
    return 0


# ── settings, database ───────────────────────────────────────────────────────────────────────────────────────


@app.command(name="settings")
def show_settings(
    file: SettingsFile = None,
    data_dir: DataDir = None,
    port_offset: PortOffset = None,
    schema: Annotated[bool, typer.Option("--schema", help="The JSON schema of plato.yaml instead.")] = False,
) -> int:
    """Print the settings, passwords left out: those in force in the running cluster of this folder; where none runs, or a
    file or an offset is named, those of a start (flag > PLATO_SECTION__KEY > plato.yaml > default)."""
    import json

    from plato.cli.show import without_passwords
    from plato.runtime.settings import Settings, dump

    if schema:
        print(json.dumps(Settings.model_json_schema(), indent=1))
        return 0
    loaded = _settings(file, data_dir, port_offset)
    running = None if file is not None or port_offset is not None else _running(loaded)
    if running is not None:
        print(
            f"# in force in {running.data_dir}, where Plato runs; a second instance of a service listens 10 ports higher."
        )
        print("# `plato settings --settings plato.yaml` shows what another start would use.")
        loaded = running.in_force()
    print(without_passwords(dump(loaded)), end="")
    return 0


def _running(settings: Settings) -> LocalCluster | None:
    """The cluster of these settings' folder, if it is up."""
    from plato.local.cluster import LocalCluster
    from plato.local.folder import data_dir as chosen

    cluster = LocalCluster(chosen(settings))
    return cluster if cluster.running and cluster.folder.read_status() is not None else None


@db.command()
def migrate(
    settings: SettingsFile = None,
    data_dir: DataDir = None,
    wait_s: Annotated[
        float, typer.Option("--wait-s", min=0, help="How long database.uri is tried again while it does not answer.")
    ] = 60,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            envvar="PLATO_CLUSTER",
            metavar="NAMESPACE/NAME",
            help="PlatoCluster that the schema and the store's key prefix are marked with; another one's are refused.",
        ),
    ] = "",
    adopt: Annotated[
        str,
        typer.Option(
            "--adopt",
            envvar="PLATO_ADOPT",
            metavar="NAMESPACE/NAME,…",
            help="With --cluster: those, deleted by now, whose marks are replaced; with commas between.",
        ),
    ] = "",
) -> int:
    """Bring a database to this version's schema: the running embedded cluster's with --data-dir, else the one of
    database.uri, else the running one of this folder. Ends with 3 where schema or store belong to another PlatoCluster, 2
    for what else waiting does not mend, 1 for the rest."""
    from plato.cli.show import without_passwords
    from plato.local import database
    from plato.local.folder import LocalError
    from plato.local.folder import data_dir as chosen

    loaded = _settings(settings, data_dir)
    if data_dir is not None or "uri" not in loaded.database.model_fields_set:
        running = _running(loaded)
        if running is None:
            raise LocalError(
                f"Plato is not running in {chosen(loaded)}; start it with `plato up`, or name another database by "
                "database.uri (and no --data-dir)"
            )
        loaded, wait_s = running.settings, 0

    def say(line: str) -> None:
        print(f"plato: {line}", file=sys.stderr, flush=True)

    schema = loaded.database.schema_name
    version = asyncio.run(database.migrate_when_it_answers(loaded, wait_s, say, cluster, adopt))
    print(f"the schema {schema} is at version {version}, in {without_passwords(loaded.database.uri)}")
    if stands := asyncio.run(database.prepare_bus(loaded, wait_s, say)):
        print(stands)
    return 0


@app.command()
def version() -> int:
    """Print the version."""
    from plato import __version__

    print(f"plato {__version__}")
    return 0


def main() -> int:
    """Runs a command line. Returns the exit code; prints one line for whatever went wrong."""
    command = typer.main.get_command(app)
    try:
        return int(command.main(prog_name="plato", standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as e:
        return _told(e)


def _told(error: Exception) -> int:
    from plato.api.names import EXIT_NOT_ALONE
    from plato.core.errors import PlatoError
    from plato.local.folder import LocalError
    from plato.local.servers import ServerError
    from plato.runtime.settings import NotAlone, SettingsError

    text, code = str(error), 1
    if isinstance(error, SettingsError):
        code = EXIT_NOT_ALONE if isinstance(error, NotAlone) else 2
    elif hasattr(error, "format_message"):  # typer's own: a wrong option or argument
        context = getattr(error, "ctx", None)
        called = "plato" if context is None else str(context.command_path)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return 2
        said = str(error.format_message()).rstrip(". ")
        text, code = f"{said} See `{called} --help`" if said.endswith("?") else f"{said}; see `{called} --help`", 2
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        at = f" to hold {error.filename}" if error.filename else ""
        text = f"the disk is full: there is no room{at}; make room and try again"
    elif not isinstance(error, (LocalError, ServerError, PlatoError)):
        if os.environ.get("PLATO_DEBUG"):
            raise error
        text = f"{type(error).__name__}: {error}; PLATO_DEBUG=1 shows where"
    print(f"plato: {' '.join(text.split())}", file=sys.stderr)
    return code
