"""Which addresses are public: those of RFC 6890's registries, and IPv4 inside of IPv6."""

import pytest

from torch_moe_mps.serving.media.addresses import is_public

PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]
NOT_PUBLIC = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1",
    "::", "::1", "fe80::1", "fe80::1%eth0", "fd00::1", "ff02::1", "2001:db8::1", "100::1",
    "fec0::1", "feff::1", "5f00::1", "3fff::1",
    "64:ff9b:1::7f00:1", "64:ff9b:1::808:808", "64:ff9b:1:0a00:0:100::", "64:ff9b::7f00:1",
    "64:ff9b::a01:203",
    "::127.0.0.1", "::10.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::ffff:0:127.0.0.1", "::ffff:0:10.0.0.1",
    "2002:7f00:1::", "2002:a00:1::", "2001:0:7f00:1::f5ff:fffe", "2001:0:808:808::80ff:fffe",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address):
    assert is_public(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_of_a_machine_its_network_and_of_no_network_are_not_public(address):
    assert not is_public(address)
