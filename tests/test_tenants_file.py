"""The tenants file: what it grants, whom it lets in, and that whatever is wrong in it is said in one line."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from retire.core.errors import SeamError, Unauthorized
from retire.core.types import TenantId
from retire.tenants import DEFAULT, Registry, Tenant, cache_salt

SECRET = "sk-acme-very-secret"
ACME, BETA = TenantId("acme"), TenantId("beta")
BETA_SHA256 = hashlib.sha256(b"sk-beta").hexdigest()
GOOD = f"""
[tenants.acme]
keys = ["{SECRET}", "sk-acme-2"]
scopes = 3
transitions = 2
pin_blocks = 40
pin_share = 0.25
beyond_quota = "cold"
dram_bytes = 1_000_000

[tenants.beta]
key_sha256 = ["{BETA_SHA256}"]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.toml"


def read(path: Path, text: str) -> Registry:
    path.write_text(text, encoding="utf-8")
    return Registry.load(path)


def one(more: str, name: str = "acme") -> str:
    return f'[tenants.{name}]\nkeys = ["{SECRET}"]\n{more}\n'


# -- what is granted ---------------------------------------------------------------------------------------------------


def test_a_tenant_has_what_its_table_says_and_defaults_for_the_rest(path: Path) -> None:
    registry = read(path, GOOD)
    acme, beta = registry.tenant(ACME), registry.tenant(BETA)
    assert registry.ids == (ACME, BETA)
    assert (acme.scopes, acme.transitions, acme.beyond_quota, acme.dram_bytes) == (3, 2, "cold", 1_000_000)
    assert (beta.scopes, beta.transitions, beta.beyond_quota, beta.dram_bytes) == (None, None, "best_effort", None)
    assert registry.tenant(TenantId("nobody")) == Tenant(TenantId("nobody"))


@pytest.mark.parametrize(
    ("blocks", "share", "quota"),
    [
        (None, None, 50),
        (10, None, 10),
        (None, 0.25, 25),
        (10, 0.25, 10),
        (30, 0.25, 25),
        (0, None, 0),
        (None, 0.0, 0),
        (None, 1.0, 101),
        (90, None, 90),
    ],
)
def test_the_pin_quota_is_the_smaller_of_what_is_given_and_half_the_pool_otherwise(
    blocks: int | None, share: float | None, quota: int
) -> None:
    assert Tenant(ACME, pin_blocks=blocks, pin_share=share).pin_quota(101) == quota


@given(
    st.none() | st.integers(0, 10**6), st.none() | st.floats(0, 1), st.integers(0, 10**6)
)  # fmt: skip
def test_a_pin_quota_never_exceeds_what_was_granted(blocks: int | None, share: float | None, pool: int) -> None:
    quota = Tenant(ACME, pin_blocks=blocks, pin_share=share).pin_quota(pool)
    assert quota >= 0
    assert blocks is None or quota <= blocks
    assert share is None or quota <= math.floor(share * pool)
    assert blocks is not None or quota <= pool


def test_caches_are_isolated_when_there_is_somebody_to_isolate_from_unless_the_file_says_otherwise(path: Path) -> None:
    assert read(path, GOOD).isolated
    assert not read(path, one("")).isolated
    assert not read(path, "isolate_prefix_cache = false\n" + GOOD).isolated
    assert read(path, "isolate_prefix_cache = true\n" + one("")).isolated
    assert not Registry.single(["key"]).isolated


# -- who is let in -----------------------------------------------------------------------------------------------------


def test_every_key_names_its_tenant(path: Path) -> None:
    registry = read(path, GOOD)
    for key, tenant in ((SECRET, ACME), ("sk-acme-2", ACME), ("sk-beta", BETA)):
        assert registry.authenticate(f"Bearer {key}") == tenant
        assert registry.authenticate(f"bearer {key}") == tenant


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", SECRET, f"Basic {SECRET}", f"Bearer {SECRET} ", f"Bearer {SECRET}x",
     f"Bearer {BETA_SHA256}", "Bearer acme", f"Bearer  {SECRET}"],
)  # fmt: skip
def test_everybody_else_is_a_stranger(path: Path, header: str | None) -> None:
    with pytest.raises(Unauthorized) as refused:
        read(path, GOOD).authenticate(header)
    assert str(refused.value) == "Unauthorized"


@given(st.text(max_size=40))
def test_no_other_text_is_a_key(text: str) -> None:
    assume(text not in {"one", "two"})
    registry = Registry.single(["one", "two"])
    with pytest.raises(Unauthorized):
        registry.authenticate(f"Bearer {text}")


def test_without_a_file_there_is_the_default_tenant_behind_vllms_keys_or_behind_none() -> None:
    assert Registry.single().authenticate(None) == DEFAULT
    assert Registry.single(["", "k"]).authenticate("Bearer k") == DEFAULT
    assert Registry.single().accepting(["", "k"]).authenticate("Bearer k") == DEFAULT
    with pytest.raises(Unauthorized):
        Registry.single(["k"]).authenticate(None)
    assert not Registry.single(["k"]).guards("/v1/models"), "that is vLLM's own affair then"


def test_with_a_file_every_route_asks_for_a_key_but_those_that_show_nothing_of_anybody(path: Path) -> None:
    registry = read(path, one(""))
    assert all(
        map(registry.guards, ("/v1/models", "/v1/chat/completions", "/invocations", "/tokenize", "/health/", ""))
    )
    assert not any(map(registry.guards, ("/health", "/metrics", "/version")))


def test_vllms_own_keys_beside_a_file_are_refused(path: Path) -> None:
    registry = read(path, GOOD)
    assert registry.accepting([""]) is registry
    with pytest.raises(SeamError, match="--api-key") as refused:
        registry.accepting(["sk-of-vllm"])
    assert str(path) in str(refused.value)
    assert "sk-of-vllm" not in str(refused.value)


def test_the_environment_names_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(GOOD)
    monkeypatch.setenv("RETIRE_TENANTS", str(path))
    assert Registry.from_env().ids == (ACME, BETA)
    monkeypatch.setenv("RETIRE_TENANTS", "")
    assert Registry.from_env().ids == (DEFAULT,)
    monkeypatch.delenv("RETIRE_TENANTS")
    assert Registry.from_env().ids == (DEFAULT,)


# -- what is wrong in it -----------------------------------------------------------------------------------------------

MALFORMED = {
    "no TOML": ("[tenants", ["TOML"]),
    "no tenants": ("", ["tenants"]),
    "an empty table of tenants": ("[tenants]\n", ["tenants"]),
    "tenants that are no table": ("tenants = 3\n", ["tenants"]),
    "a tenant that is no table": (f'[tenants]\nacme = "{SECRET}"\n', ["tenants"]),
    "a key in the place of a name": (f'[tenants]\n"{SECRET}" = "acme"\n', ["tenants"]),
    "too many tenants": ("".join(f'[tenants.t{n}]\nkeys=["k{n}"]\n' for n in range(257)), ["tenants"]),
    "a nameless tenant": (one("", '""'), ["tenant ''"]),
    "a name of two lines": (one("", r'"a\nb"'), [r"tenant 'a\nb'"]),
    "a name that is too long": (one("", "a" * 65), ["64"]),
    "an unknown field": (one("scope = 4"), ["acme", "scope"]),
    "an unknown field of the file": ("isolate = true\n" + GOOD, ["isolate"]),
    "an isolation that is no boolean": ('isolate_prefix_cache = "yes"\n' + GOOD, ["isolate_prefix_cache"]),
    "no keys": ("[tenants.acme]\nscopes = 3\n", ["acme", "keys"]),
    "an empty list of keys": ("[tenants.acme]\nkeys = []\n", ["acme", "keys"]),
    "an empty key": ('[tenants.acme]\nkeys = [""]\n', ["acme", "keys"]),
    "a key with a space": ('[tenants.acme]\nkeys = ["sk acme"]\n', ["acme", "keys"]),
    "a key with a line break": ('[tenants.acme]\nkeys = ["sk\\n"]\n', ["acme", "keys"]),
    "keys that are no list": (f'[tenants.acme]\nkeys = "{SECRET}"\n', ["acme", "keys"]),
    "a key that is no string": ("[tenants.acme]\nkeys = [7]\n", ["acme", "keys"]),
    "a key in the place of its hash": (f'[tenants.acme]\nkey_sha256 = ["{SECRET}"]\n', ["acme", "key_sha256"]),
    "a hash that is too short": (f'[tenants.acme]\nkey_sha256 = ["{BETA_SHA256[:-2]}"]\n', ["acme", "key_sha256"]),
    "the hash of nothing": (
        f'[tenants.acme]\nkey_sha256 = ["{hashlib.sha256().hexdigest()}"]\n', ["acme", "key_sha256"]
    ),
    "a key twice": (f'[tenants.acme]\nkeys = ["{SECRET}", "{SECRET}"]\n', ["acme", "keys"]),
    "a key and its hash": (
        f'[tenants.acme]\nkeys = ["sk-beta"]\nkey_sha256 = ["{BETA_SHA256}"]\n', ["acme", "keys"]
    ),
    "one key, two tenants": (one("") + one("", "beta"), ["acme", "beta", "keys"]),
    "one key, two tenants, two spellings": (
        f'[tenants.beta]\nkeys = ["sk-beta"]\n[tenants.acme]\nkey_sha256 = ["{BETA_SHA256.upper()}"]\n',
        ["acme", "beta", "keys"],
    ),
    "a tenant twice": (one("") + one(""), ["TOML"]),
    "shares beyond the pool": (
        one("pin_share = 0.6") + '[tenants.beta]\nkeys = ["b"]\npin_share = 0.41\n', ["pin_share"]
    ),
    **{
        f"{field} = {value}": (one(f"{field} = {value}"), ["acme", field])
        for field, values in {
            "scopes": ("0", "-1", "1.0", "true", '"3"', "nan", "1048577", "[]"),
            "transitions": ("-1", "1.5", "false", "inf", "99999999999999999999"),
            "pin_blocks": ("-1", "2.5", "true", "nan", '"all"'),
            "pin_share": ("-0.1", "1.1", "nan", "inf", "true", '"half"', "-1", "2", "2024-01-01"),
            "beyond_quota": ('"warm"', "true", "0", '""'),
            "dram_bytes": ("-1", '"1G"', "0.5"),
        }.items()
        for value in values
    },
}  # fmt: skip


@pytest.mark.parametrize(("text", "named"), MALFORMED.values(), ids=MALFORMED)
def test_what_is_wrong_is_said_in_one_line_that_names_the_place_and_no_key(
    path: Path, text: str, named: list[str]
) -> None:
    with pytest.raises(SeamError) as refused:
        read(path, text)
    said = str(refused.value)
    assert "\n" not in said
    assert str(path) in said
    assert all(word in said for word in named), said
    assert SECRET not in said
    assert SECRET not in repr(refused.value.__cause__)


@pytest.mark.parametrize("bad", ["missing", "a folder", "not UTF-8"])
def test_a_file_that_cannot_be_read_is_named(path: Path, bad: str) -> None:
    if bad == "a folder":
        path.mkdir()
    elif bad == "not UTF-8":
        path.write_bytes(b'[tenants.acme]\nkeys = ["\xff"]\n')
    with pytest.raises(SeamError) as refused:
        Registry.load(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_shares_that_make_up_the_whole_pool_are_fine_however_they_are_rounded(path: Path) -> None:
    tables = [f'[tenants.t{n}]\nkeys = ["k{n}"]\npin_share = 0.1\n' for n in range(10)]
    assert len(read(path, "".join(tables)).ids) == 10


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(codec="utf-8"), max_size=200) | st.binary(max_size=200))
def test_no_content_brings_anything_but_a_registry_or_a_clear_line(path: Path, content: str | bytes) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = ""
    try:
        assert Registry.load(path).ids
    except SeamError as error:
        said = str(error)
    assert "\n" not in said


def test_no_key_and_no_hash_of_one_is_shown_with_a_tenant(path: Path) -> None:
    assert SECRET not in repr(read(path, GOOD).tenant(ACME))
    assert "digest" not in repr(read(path, GOOD).tenant(ACME))


# -- what stands for a tenant in the prefix cache ----------------------------------------------------------------------

OWN = st.none() | st.text(min_size=1, max_size=20)


@given(st.tuples(st.text(min_size=1), OWN), st.tuples(st.text(min_size=1), OWN))
def test_two_salts_are_equal_only_for_one_tenant_and_one_salt_of_its_own(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    assume("\0" not in one[0] + other[0])  # no tenant's name has it
    salts = [cache_salt(TenantId(name), 7, own) for name, own in (one, other)]
    assert (salts[0] == salts[1]) == (one == other)
    assert cache_salt(TenantId(one[0]), 8, one[1]) not in salts


def test_whoever_is_nobody_shares_with_nobody() -> None:
    assert cache_salt(None, 7, "s") != cache_salt(None, 7, "s")


def test_the_documented_file_is_understood(path: Path) -> None:
    documented = (Path(__file__).parents[1] / "docs" / "TENANTS.md").read_text(encoding="utf-8")
    registry = read(path, documented.partition("```toml\n")[2].partition("```")[0])
    assert registry.authenticate("Bearer sk-acme-ci") == ACME
    assert registry.tenant(ACME).pin_quota(10_000) == 2000
    assert registry.tenant(BETA).pin_quota(10_000) == 0
