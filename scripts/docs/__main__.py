"""Write the generated pages and pictures: `python -m scripts.docs`."""

from scripts.docs.pages import write


def main() -> None:
    """Write what is out of date, and print its paths."""
    for path in write():
        print(path)


if __name__ == "__main__":
    main()
