// Pages opened as files may not start workers: the search's worker runs in a frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inside = (this.inside = frame.contentWindow)
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = () => {} // needed for languages other than English alone
      const script = inside.document.createElement("script")
      script.src = url
      this.ready = new Promise(resolve => (script.onload = resolve))
      inside.document.body.appendChild(script)
    }
    postMessage(data) {
      const message = new MessageEvent("message", { data })
      this.ready.then(() => this.inside.dispatchEvent(message))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
