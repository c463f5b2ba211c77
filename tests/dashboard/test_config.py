"""Which settings of the dashboard are refused before anything is opened."""

import pytest

from oncebridge.errors import ConfigError, ConfigErrors
from oncebridge.http.addresses import ListenAddress
from oncebridge.service.config import load

TOKEN = "sixteen-letters!"


def loading(**flags):
    return load(environment={}, flags=flags)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8081", "127.0.0.1", 8081),
        ("localhost:0", "localhost", 0),
        ("[::1]:8081", "::1", 8081),
        ("http://127.0.0.1:8081", "127.0.0.1", 8081),
        ("http://127.0.0.1:8081/", "127.0.0.1", 8081),
        ("http://[::1]:65535/", "::1", 65535),
    ],
)
def test_an_address_is_a_host_and_a_port(text, host, port):
    assert loading(dashboard=text).config.dashboard == text
    assert ListenAddress.read(text, "dashboard") == ListenAddress(host, port)


@pytest.mark.parametrize(
    "text",
    [
        *("8081", ":8081", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536"),
        *("https://127.0.0.1:8081", "http://127.0.0.1:8081/path", "http://a:b@127.0.0.1:8081"),
        *("127.0.0.1:8081?x=1", "127.0.0.1:8081#x", "::1:8081", "[::1", "a b:1", "http://:8081"),
    ],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        loading(dashboard=text, dashboard_token=TOKEN)


BEYOND = [
    *("0.0.0.0:8081", "[::]:8081", "192.0.2.7:8081", "[2001:db8::1]:8081", "10.0.0.1:0"),
    *("oncebridge.example.com:8081", "localhost.example.com:8081", "127.1:8081", "0:8081"),
    *("2130706433:8081", "[::ffff:127.0.0.1]:8081", "http://0.0.0.0:8081/"),
]


@pytest.mark.parametrize("address", BEYOND)
def test_beyond_this_machine_people_have_to_say_who_they_are(address):
    with pytest.raises(ConfigError) as caught:
        loading(dashboard=address)
    told = str(caught.value)
    assert told.startswith("--dashboard: ")
    assert all(name in told for name in ("dashboard_token", "dashboard_user_header", "127.0.0.1"))
    proxy = {"dashboard_proxies": "10.0.0.7"}
    assert loading(dashboard=address, dashboard_token=TOKEN).config.dashboard == address
    assert (
        loading(dashboard=address, dashboard_user_header="X-User", **proxy).config.dashboard
        == address
    )


def test_it_is_told_where_it_stands(tmp_path):
    file = tmp_path / "pipe.toml"
    file.write_text('dashboard = "0.0.0.0:8081"\ndashboard_hosts = ["ok.example", "*.example"]')
    with pytest.raises(ConfigErrors) as caught:
        load(file, environment={})
    assert [problem.where for problem in caught.value.problems] == [
        "dashboard_hosts[1]",
        "dashboard",
    ]
    with pytest.raises(
        ConfigError, match=r"^ONCEBRIDGE_DASHBOARD: other machines can reach 0\.0\.0\.0:1"
    ):
        load(environment={"ONCEBRIDGE_DASHBOARD": "0.0.0.0:1"}, flags={})


def test_a_token_that_is_missing_is_told_once(monkeypatch):
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    with pytest.raises(ConfigError) as caught:
        loading(dashboard="0.0.0.0:8081", dashboard_token="env:NO_SUCH_VARIABLE")
    assert "NO_SUCH_VARIABLE" in str(caught.value)
    assert "other machines" not in str(caught.value)


@pytest.mark.parametrize(
    "token",
    ["x" * 15, "short", " " * 20, "x" * 10 + " " * 10, " " + "x" * 20, "x" * 10 + "\n" + "x" * 10],
)
def test_a_token_that_is_weak_or_cannot_be_sent_is_refused_and_not_quoted(token):
    with pytest.raises(ConfigError) as caught:
        loading(dashboard_token=token)
    assert str(caught.value).startswith("--dashboard-token: ")
    assert token not in str(caught.value)


@pytest.mark.parametrize("header", ["", "X User", "X:User", "Ü", "Cookie", "authorization", "Host"])
def test_a_header_that_cannot_name_anybody_is_refused(header):
    with pytest.raises(ConfigError, match="dashboard-user-header"):
        loading(dashboard_user_header=header)


def test_a_header_that_no_proxy_may_send_is_refused():
    with pytest.raises(ConfigError, match="set dashboard_proxies to the address of your proxy"):
        loading(dashboard="127.0.0.1:8081", dashboard_user_header="X-User")


@pytest.mark.parametrize("network", ["10.0.0.0/33", "proxy.example.com", "0.0.0.0/0", "::/0"])
def test_a_proxy_is_an_address_or_a_network_and_not_everybody(network):
    with pytest.raises(ConfigError, match="dashboard-proxies"):
        loading(dashboard_proxies=f"10.0.0.1, {network}")


@pytest.mark.parametrize("name", ["*", "*.example.com", "https://x.example.com", "x.com/", "a b"])
def test_a_further_name_is_one_as_browsers_send_it(name):
    with pytest.raises(ConfigError, match="dashboard-hosts"):
        loading(dashboard_hosts=f"a.example.com, {name}")
    assert loading(dashboard_hosts="a.example.com, [::1]:80, b_c:8081")


def test_several_mistakes_are_told_at_once():
    with pytest.raises(ConfigErrors) as caught:
        loading(dashboard="nowhere", dashboard_token="short", dashboard_proxies="x")
    assert len(caught.value.problems) == 3
