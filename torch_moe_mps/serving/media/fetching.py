"""Fetching of http: and https: URLs in requests, from public addresses only."""

import asyncio
import functools
import socket
import ssl
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor

import httpx2

from ..._text import first_line
from ..http.request import Refused
from .addresses import is_public

# More threads than one client has requests: its names may be slow to look up.
_RESOLVERS = ThreadPoolExecutor(64, "resolver")


async def fetched(url: str, field: str, hosts: Container[str], limit: int) -> bytes:
    """Content of a URL. Redirects are not followed, as they may lead to any address.

    Args:
        hosts: allowed to have private addresses.
        limit: maximum number of bytes.

    Raises: Refused, OverflowError beyond the limit, TimeoutError.
    """
    try:
        asked = httpx2.URL(url)
        addresses = await _addresses(asked, asked.host.lower() in hosts)
        for number, address in enumerate(addresses, 1):
            try:
                return await _content(asked, address, limit)
            except httpx2.ConnectError:
                if number == len(addresses):
                    raise
    except (OSError, ValueError, httpx2.HTTPError, httpx2.InvalidURL) as error:
        if isinstance(error, TimeoutError):
            raise
        reason = first_line(error) or type(error).__name__
        raise Refused(f"'{field}' cannot be fetched: {reason}.", field, "invalid_value") from None
    raise AssertionError("getaddrinfo names at least one address, or raises")


async def _addresses(asked: httpx2.URL, is_named: bool) -> list[str]:
    """Checked addresses of a host; the request uses these, as a name may resolve differently each time.

    Raises: OSError.
    """
    port = asked.port or (443 if asked.scheme == "https" else 80)
    if port > 65535:
        raise OSError(f"the port is {port}")
    asks = functools.partial(socket.getaddrinfo, asked.host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, asks)
    addresses = [str(address[0]) for *_, address in found]
    for address in addresses:
        if not is_named and not is_public(address):
            host = asked.host
            raise OSError(f"{host} is of this machine or its network; --media-host {host} allows it")
    return addresses


async def _content(asked: httpx2.URL, address: str, limit: int) -> bytes:
    """Body of a response. Raises: OSError, httpx2.HTTPError, OverflowError."""
    headers = {"host": asked.netloc.decode(), "accept-encoding": "identity"}
    place = asked.copy_with(host=address, username=None, password=None)
    names = {"sni_hostname": asked.host}  # the server must show its certificate
    # A connection is of one request: those that are kept are known by their address alone.
    client = httpx2.AsyncClient(verify=_certificates(), trust_env=False, timeout=None)
    async with client, client.stream("GET", place, headers=headers, extensions=names) as answer:
        if answer.status_code != 200:
            more = ", and redirects are not followed" if answer.is_redirect else ""
            raise OSError(f"the status is {answer.status_code}{more}")
        made = bytearray()
        async for part in answer.aiter_raw():
            made += part
            if len(made) > limit:
                raise OverflowError
    return bytes(made)


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
