"""The ancestor's name for `view_run`, which shows images too."""

from atroposlib.cli.view_run import main

if __name__ == "__main__":
    main()
