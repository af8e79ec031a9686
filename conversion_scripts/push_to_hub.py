"""Run `iha.api.push` as a command of the checkout."""

from functools import partial

from iha import api, cli, errors


main = partial(cli.call, api.push)

if __name__ == "__main__":
    errors.run_cli(main)
