"""Write the address of the repository into the metadata of the three packages, before a release.

    python .ci/add_urls.py https://github.com/OWNER/NAME [FOLDER]

The address is that of the repository which runs the release, so no file has to know it. FOLDER
holds the packages; default packages/.
"""

import sys
from pathlib import Path

LINKS = {
    "Source": "",
    "Documentation": "/blob/HEAD/docs/index.md",
    "Changelog": "/blob/HEAD/CHANGELOG.md",
    "Issues": "/issues",
}


def main(repository: str, folder: str = "packages") -> None:
    """Add the links to each [project.urls]."""
    lines = [f'{name} = "{repository.rstrip("/")}{path}"\n' for name, path in LINKS.items()]
    for project in sorted(Path(folder).glob("*/pyproject.toml")):
        before, header, after = project.read_text("utf-8").partition("[project.urls]\n")
        if not header or "Source = " in after:
            sys.exit(f"{project}: [project.urls] is missing, or has its links already")
        project.write_text(before + header + "".join(lines) + after, "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
