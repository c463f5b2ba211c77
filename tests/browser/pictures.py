"""
Makes the pictures of the dashboard that the documentation shows.

    python -m tests.browser.pictures docs/img

An hour of a simulated contact centre, as a person would see it: everything in it is invented.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from tests.browser.stage import Stage, Visits
from tests.browser.towns import stocked

_SIZE = {"width": 1280, "height": 840}
_MOST_BYTES = 150 * 1024


def _take(visits, url, folder):
    page = visits.open(url, size=_SIZE)
    page.wait_for_timeout(6_000)  # until there are rates
    picture = folder / "dashboard.png"
    page.screenshot(path=picture, animations="disabled")
    size = picture.stat().st_size
    print(f"{picture}: {size / 1024:.0f} KB")
    if size > _MOST_BYTES:
        raise SystemExit(f"{picture} has more than {_MOST_BYTES // 1024} KB")


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    stage = Stage()
    place = Path(tempfile.mkdtemp())
    try:
        with stocked(place, minutes=58, refuses_one_in=300) as centre:
            visits = Visits(stage)
            stage.run(_take, visits, centre.url, folder)
            stage.run(visits.close)
    finally:
        shutil.rmtree(place)
        stage.close()


if __name__ == "__main__":
    main()
