"""The Gradio page: the player in a `gr.HTML`, and the slow widgets around it.

Gradio draws the page and nothing else. The picture and the keys go over our own websocket, from the
same streamgen.js that the page at /plain uses: Gradio's own image streaming loses most frames.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from streamgen.apps.hub import Hub
from streamgen.apps.server import STATIC, page_options, script_json
from streamgen.errors import StreamgenError
from streamgen.frames import fit_image
from streamgen.weights import registry

HELP = """
**Walk** with W A S D or the arrows: forward and back, and *turn* left and right. Q and E step
sideways. **Space** pauses at the very frame you see, **R** goes back two seconds, **B** branches:
the walk so far is kept, and its chip brings you back to it.

**Change the world** with a sentence of your own or one of the suggestions. It applies to the next
chunk of frames, and the list tells you at which frame that was.

The same seed with the same keys and prompts gives the same frames. **Record** writes an mp4 beside
the picture without slowing it down. Two tabs are two walks.
"""

# Before any script has run the page is dark already.
HEAD = '<meta name="color-scheme" content="dark"><style>html, body { background: #0b0d10; }</style>'

CSS = """
.gradio-container, .gradio-container > .main, body, gradio-app { background: #0b0d10 !important; }
.gradio-container { max-width: none !important; padding: 8px 24px 24px !important; }
.gradio-container > main, .gradio-container .main { padding: 8px 0 !important; gap: 0 !important; }
.sg-page { border: 0 !important; padding: 0 !important; background: none !important; }
.sg-below { max-width: 1160px; margin: 4px auto 0 !important; width: 100%; border: 0 !important;
  background: none !important; }
.sg-below .label-wrap { color: #8b939e; }
footer { display: none !important; }
"""


def mount(app: FastAPI) -> FastAPI:
    """Put the page at "/" of an app from `create_app`. Raises ImportError without Gradio."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when gradio is imported
    import gradio as gr

    hub: Hub = app.state.hub
    css = (STATIC / "streamgen.css").read_text(encoding="utf-8") + CSS
    mounted: FastAPI = gr.mount_gradio_app(
        app,
        build(hub),
        path="/",
        css=css,
        head=HEAD,
        js="() => document.body.classList.add('dark')",
        theme=gr.themes.Base(
            font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
        ),
        footer_links=[],
        run_history=False,
        show_error=True,
    )
    return mounted


def build(hub: Hub) -> Any:
    """The page as `gr.Blocks`."""
    import gradio as gr

    with gr.Blocks(title=f"streamgen · {hub.name}", analytics_enabled=False) as page:
        player = gr.HTML(
            value="",
            html_template='<div class="sg-mount"></div>',
            js_on_load=player_script(hub),
            apply_default_css=False,
            elem_classes="sg-page",
            container=False,
            image="",
        )
        with gr.Accordion("Help, a first frame of your own, and the model card", open=False,
                          elem_classes="sg-below"):  # fmt: skip
            with gr.Row():
                with gr.Column(scale=3):
                    gr.Markdown(HELP)
                with gr.Column(scale=2):
                    picture = gr.Image(
                        label="Start from this picture", type="numpy", sources=["upload"],
                        height=220,
                    )  # fmt: skip
            card = model_card(hub)
            if card:
                gr.Markdown(card)

        def use_picture(pixels: Any) -> Any:
            config = hub.world.config
            fitted = fit_image(pixels, width=config.width, height=config.height)
            return gr.HTML(image=hub.add_pixels(fitted))

        picture.upload(
            use_picture,
            picture,
            player,
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
    return page


def player_script(hub: Hub) -> str:
    """What runs when the element is there: streamgen.js, then one call."""
    script = (STATIC / "streamgen.js").read_text(encoding="utf-8")
    options = script_json(page_options(hub))
    return (
        f"{script}\n"
        f"const player = mountStreamgen(element.querySelector('.sg-mount'), {options});\n"
        "watch('image', () => { if (props.image) player.setImage(props.image); });\n"
    )


def model_card(hub: Hub) -> str:
    """The README.md of the world's folder without its front matter; empty if it has none."""
    try:
        folder = Path(getattr(hub.world, "folder", None) or registry.resolve(hub.name))
        text = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, StreamgenError):
        return ""
    if text.startswith("---\n"):
        text = text.partition("\n---\n")[2]
    return text.strip()
