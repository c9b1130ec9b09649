"""Keys: their form, their checksum, and that no secret leaks through them."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.access import keys
from gateway.core.access.keys import BASE62, KeyClass

PEPPER = b"p" * 32


@pytest.mark.parametrize("key_class", get_args(KeyClass))
def test_a_minted_key_parses_to_its_class_and_id(key_class: KeyClass) -> None:
    text, public_id = keys.mint(key_class)
    assert re.fullmatch(rf"bt_{key_class}_[0-9A-Za-z]{{12}}_[0-9A-Za-z]{{38}}", text)
    parsed = keys.parse(text)
    assert (parsed.key_class, parsed.public_id, parsed.text) == (key_class, public_id, text)


def test_keys_are_all_different() -> None:
    minted = [keys.mint("data") for _ in range(200)]
    assert len({text for text, _ in minted}) == len({public_id for _, public_id in minted}) == 200


@given(st.data())
def test_any_one_changed_character_is_noticed(data: st.DataObject) -> None:
    text, _ = keys.mint("data")
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from([c for c in BASE62 + "_-" if c != text[at]]))
    with pytest.raises(ValueError, match=r"form|checksum"):
        keys.parse(text[:at] + other + text[at + 1 :])


@pytest.mark.parametrize("text", ["", "sk-abc", "bt_root_000000000000_" + "0" * 38, "bt_data_short_" + "0" * 38])
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="form"):
        keys.parse(text)


def test_trailing_text_is_refused() -> None:
    text, _ = keys.mint("data")
    for changed in (text + "\n", text + "0", " " + text, text[:-1]):
        with pytest.raises(ValueError, match="form"):
            keys.parse(changed)


def test_errors_and_repr_never_show_the_secret() -> None:
    text, _ = keys.mint("admin")
    assert text not in repr(keys.parse(text))
    with pytest.raises(ValueError, match="checksum") as caught:
        keys.parse(text[:-1] + ("0" if text[-1] != "0" else "1"))
    assert text[-20:-1] not in str(caught.value)


def test_the_checksum_is_crc32_in_base62() -> None:
    assert keys.checksum("") == "000000"
    value = 0
    for digit in keys.checksum("123456789"):
        value = value * 62 + BASE62.index(digit)
    assert value == 0xCBF43926  # CRC-32's published check value


def test_the_digest_depends_on_text_and_pepper() -> None:
    text, _ = keys.mint("data")
    stored = keys.digest(text, PEPPER)
    assert len(stored) == 32
    assert keys.matches(text, PEPPER, stored)
    assert not keys.matches(text, b"q" * 32, stored)
    assert not keys.matches(keys.mint("data")[0], PEPPER, stored)


def test_a_short_pepper_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        keys.digest("text", b"short")
